//! Options of the tools that show user stacks.

use std::ops::Deref;

use anyhow::Result;
use clap::error::ErrorKind;
use clap::{ArgMatches, Args, Command, FromArgMatches, ValueEnum};

use crate::bpf::types::unwind_mode;
use crate::interpreters::{InterpreterArgs, Interpreters};
use crate::parse;
use crate::process::filter;

/// Default of --unwind-memory: memory for tables, in MiB.
const DEFAULT_MEMORY: usize = 64;

/// How callers are found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// By unwind tables, or by frame pointers until a file has a table
    #[default]
    Auto,
    /// By unwind tables only
    Dwarf,
    /// By frame pointers only
    Fp,
}

/// Options of the tools that show user stacks, none of which would do nothing.
#[derive(Debug, Clone, Copy)]
pub struct UnwindArgs(UncheckedUnwindArgs);

/// What [`UnwindArgs`] has, before it is known whether that makes sense together.
#[derive(Debug, Clone, Copy, Args)]
pub struct UncheckedUnwindArgs {
    /// Stack unwinding method
    ///
    /// `dwarf` uses tables made from .eh_frame, `fp` frame pointers, and `auto` both.
    #[arg(help_heading = "Stacks", hide_short_help = true, id = "unwind", long, value_name = "HOW", value_enum, default_value_t = Mode::Auto)]
    pub mode: Mode,

    /// How frames of interpreters are shown.
    #[command(flatten)]
    pub interpreters: InterpreterArgs,

    /// Maximum memory for unwind tables, in MiB
    #[arg(help_heading = "Stacks", hide_short_help = true, id = "unwind_memory", long = "unwind-memory", value_name = "MIB", default_value_t = DEFAULT_MEMORY, value_parser = parse::number::<usize>)]
    pub memory: usize,
}

impl Deref for UnwindArgs {
    type Target = UncheckedUnwindArgs;

    fn deref(&self) -> &UncheckedUnwindArgs {
        &self.0
    }
}

impl Args for UnwindArgs {
    fn augment_args(command: Command) -> Command {
        UncheckedUnwindArgs::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        UncheckedUnwindArgs::augment_args_for_update(command)
    }
}

impl FromArgMatches for UnwindArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        UncheckedUnwindArgs::from_arg_matches(matches)?
            .check()
            .map(Self)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0.update_from_arg_matches(matches)
    }
}

impl UncheckedUnwindArgs {
    /// Refuses --java-names where no Java functions are shown.
    fn check(self) -> Result<Self, clap::Error> {
        if !self.interpreters.java_names || self.interpreters() != 0 {
            return Ok(self);
        }
        let cause = match self.mode {
            Mode::Fp => "--unwind fp",
            Mode::Auto | Mode::Dwarf => "--interpreters off",
        };
        let message = format!("--java-names is for Java functions, which {cause} does not show");
        Err(clap::Error::raw(ErrorKind::ArgumentConflict, message))
    }

    /// Returns the skeleton's constant `unwind_mode`.
    pub fn mode(&self) -> u8 {
        match self.mode {
            Mode::Fp => unwind_mode::UNWIND_MODE_FP,
            Mode::Auto => unwind_mode::UNWIND_MODE_AUTO,
            Mode::Dwarf => unwind_mode::UNWIND_MODE_DWARF,
        }
        .0 as u8
    }

    /// Returns the skeleton's constant `interpreters`.
    pub fn interpreters(&self) -> u8 {
        let wanted = self.interpreters.interpreters != Interpreters::Off;
        (wanted && self.mode != Mode::Fp).into()
    }

    /// Returns the skeleton's constant `python_lines`.
    pub fn python_lines(&self) -> u8 {
        (self.interpreters.interpreters != Interpreters::Merged).into()
    }

    /// Returns the skeleton's constant `unwind_namespace`.
    ///
    /// # Errors
    /// If our PID namespace cannot be read from /proc.
    pub fn namespace(&self) -> Result<u32> {
        filter::pid_namespace()
    }
}
