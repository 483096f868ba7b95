# run: the demonstration, from a clean checkout. test: every test there is.
.PHONY: run test

run:
	cargo build --release
	./target/release/forebay bench demo

test:
	cargo xtask test
