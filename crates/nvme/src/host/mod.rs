//! The host side as a state machine with no I/O (being written).
