//! Options of the copies that heaps are examined in, alike in all tools.

use std::time::Duration;

use crate::heap::capture::Request;
use crate::heap::idle::Watch;
use crate::host::capabilities::Capability;
use crate::parse;
use crate::process::proc::Process;

/// Limit on the pause of a process, unless --max-pause says otherwise.
const MAX_PAUSE: Duration = Duration::from_millis(250);

/// Options of the copies of a process's memory.
#[derive(Debug, Clone, clap::Args)]
pub struct CopyArgs {
    /// Milliseconds for which the process may be stopped while its memory is copied; a copy that takes longer is given up
    /// [default: 250]
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    pub max_pause: Option<Duration>,

    /// Copy most of the process's memory while it runs, and only what it has written since then while it stands still; the
    /// first write to each page takes a page fault for that
    #[arg(long, conflicts_with = "idle")]
    pub pre_copy: bool,
}

fn milliseconds(text: &str) -> Result<Duration, String> {
    let number = parse::count::<u64>(text)?;
    Ok(Duration::from_millis(number))
}

impl CopyArgs {
    /// Makes the request for copies of a process.
    pub fn request<'a>(&self, process: &'a Process, idle: Option<&'a Watch>) -> Request<'a> {
        Request {
            process,
            max_pause: self.max_pause.unwrap_or(MAX_PAUSE),
            pre_copy: self.pre_copy,
            idle,
        }
    }

    /// Returns the capabilities that these options take besides the others.
    pub fn capabilities(&self) -> &'static [Capability] {
        // Without this capability, the kernel does not show where pages are in memory.
        const PRE_COPY: [Capability; 1] = [Capability::CAP_SYS_ADMIN];
        if self.pre_copy { &PRE_COPY } else { &[] }
    }
}
