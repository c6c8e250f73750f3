//! Memory of the machine, of cgroups and of processes, watched for weeks: cheap reads once a second, and rules that
//! tell growth toward a limit from a program's usual waves.
//!
//! Nothing is traced. Files stay open between two looks, and are read by pread(2): opening a file of cgroupfs or of
//! /proc costs about six times as much as reading it, and an open file of a process never becomes that of another one
//! with the same pid.
//!
//! | module | what it is for |
//! |---|---|
//! | [`reread`] | files that stay open |
//! | [`machine`] | the machine's memory |
//! | [`cgroups`] | cgroups of both versions: what each uses, holds and may use, and its kills |
//! | [`processes`] | processes and their anonymous memory |
//! | [`ring`] | samples of the last minutes |
//! | [`day`] | the highest value of the last day |
//! | [`growth`] | growth toward a limit, with hysteresis |

pub mod cgroups;
pub mod day;
pub mod growth;
pub mod machine;
pub mod processes;
pub mod reread;
pub mod ring;
