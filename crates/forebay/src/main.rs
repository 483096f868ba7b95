//! The `forebay` binary: daemon, engine and commands in one program. This file only dispatches.

mod api_paths;
mod bench;
mod calibrate;
mod cli;
mod command;
mod config;
mod context;
mod engine;
mod failure;
mod image;
mod interrupt;
mod limits;
mod logging;
mod output;
mod progress;
mod serve;
mod word;

use std::process::ExitCode;

use clap::FromArgMatches;
use clap_complete::CompleteEnv;
use forebay_control::api::client::Client;

use cli::{Cli, Command};
use context::Context;
use failure::Outcome;
use output::Output;

fn main() -> ExitCode {
    abort_on_panic();
    if let Err(failure) = limits::raise_stack() {
        failure.print(false);
        return ExitCode::from(failure.exit_code());
    }
    // Ends the process if it was run for shell completion.
    CompleteEnv::with_factory(cli::line::completed).complete();
    let said = cli::definition().try_get_matches_from(cli::line::words(std::env::args_os()));
    let cli = match said.and_then(|said| Cli::from_arg_matches(&said)) {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let json = cli.json;
    match run(cli) {
        Ok(code) => code,
        Err(failure) => {
            failure.print(json);
            ExitCode::from(failure.exit_code())
        }
    }
}

fn usage(error: &clap::Error) -> ExitCode {
    if error.use_stderr() && std::env::args_os().any(|arg| arg == "--json") {
        let text = error.to_string();
        let text = text.trim().trim_start_matches("error: ");
        eprintln!("{}", failure::error_json("usage", text, None));
    } else {
        let _ = error.print();
    }
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

/// Recovery is designed for the process's death. Only panics around the catalog's database are
/// errors: it reads untrusted data.
fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !forebay_pool::panic_is_caught() {
            report(panic);
            std::process::abort();
        }
    }));
}

fn run(cli: Cli) -> Outcome<ExitCode> {
    let output = Output { json: cli.json };
    let context = || -> Outcome<Context> {
        Ok(Context {
            client: Client::new(&config::socket(cli.socket.clone())?),
            output,
            yes: cli.yes,
        })
    };
    let done = match cli.command {
        Command::Pool(command) => command::pool::pool(&context()?, command),
        Command::Device(command) => command::pool::device(&context()?, command),
        Command::Tenant(command) => command::tenant::tenant(&context()?, command),
        Command::Volume(command) => command::volume::volume(&context()?, command),
        Command::Export(command) => command::export::export(&context()?, command),
        Command::Scheduling(command) => command::scheduling::scheduling(&context()?, command),
        Command::Events(args) => command::events::events(&context()?, &args),
        Command::Port(command) => command::port::port(&context()?, &command),
        Command::Firmware(command) => command::firmware::firmware(output, command, context),
        Command::Mi(args) => command::mi::mi(output, &args, context),
        Command::Upgrade => command::status::upgrade(&context()?),
        Command::Shutdown => command::status::shutdown(&context()?),
        Command::Stats => command::status::stats(&context()?),
        Command::Status { check } => match check {
            true => command::status::check(context()),
            false => command::status::status(&context()?),
        },
        Command::Top(args) => command::top::top(&context()?, &args),
        Command::Completion { shell } => cli::pages::completion(shell),
        Command::Man { folder } => cli::pages::manual(&folder),
        Command::Serve(args) => return serve::serve(&args, cli.socket, output),
        Command::Formats => {
            println!("{}", forebay_xlate::boundary::formats());
            Ok(())
        }
        Command::Engine(args) => engine::engine(args),
        Command::Bench(command) => bench::bench(output, &command, context),
        Command::Calibrate(args) => calibrate::calibrate(&context()?, &args),
    };
    done.map(|()| ExitCode::SUCCESS)
}
