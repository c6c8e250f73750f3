//! Completion of options in shells.
//!
//! A shell asks the tool itself, with `MEMTOOLS_COMPLETE` set to the shell's name. Without further arguments the tool
//! prints the script that makes the shell ask. `make install` puts this script where bash, zsh and fish look for it.
//! [`process::complete`](crate::process::complete) completes the values of options.

use std::env;
use std::path::Path;

use clap::CommandFactory;
use clap_complete::env::CompleteEnv;

/// The environment variable that asks for completions.
const VARIABLE: &str = "MEMTOOLS_COMPLETE";

/// Answers a shell and ends the process, if a shell started the process for completions.
pub(crate) fn handle_request<A: CommandFactory>() {
    if env::var_os(VARIABLE).is_none() {
        return;
    }
    // The name under which the tool is installed: memleak, or memleak-mt.
    let program = env::args_os().next().unwrap_or_default();
    let name = Path::new(&program).file_name().unwrap_or_default();
    let name = name.to_string_lossy().into_owned();
    CompleteEnv::with_factory(A::command)
        .var(VARIABLE)
        .bin(name.clone())
        .completer(name)
        .complete();
}
