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
    /// Maximum pause for a copy, in milliseconds [default: 250]
    ///
    /// The process is paused while its memory is copied. A longer copy is abandoned, and retried.
    #[arg(hide_short_help = true, long, value_name = "MS", value_parser = milliseconds)]
    pub max_pause: Option<Duration>,

    /// Copy most memory before the pause
    ///
    /// In the pause, only modified pages are copied. The first write to each page causes a page
    /// fault.
    #[arg(hide_short_help = true, long, conflicts_with = "idle")]
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
