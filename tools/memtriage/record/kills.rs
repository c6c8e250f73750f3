//! Kills that oomkill reports while it runs beside --record.

use std::io::{BufRead, BufReader};
use std::process::Child;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use anyhow::Result;
use serde_json::Value;

use crate::tools::{self, Tool, all_of, last_message};

/// Process that was killed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ReportedKill {
    pub(crate) pid: u32,
    /// Object that `oomkill -e -j` prints.
    pub(crate) object: Value,
}

/// Objects of oomkill since the last look.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Batch {
    pub(crate) kills: Vec<ReportedKill>,
    /// Number of processes that were killed along with a victim, which may be of an earlier batch.
    also_killed: u64,
}

/// Running oomkill.
pub(crate) struct Kills {
    child: Tool,
    objects: Receiver<Value>,
    /// Thread that collects oomkill's messages. None once the end of oomkill was reported.
    messages: Option<JoinHandle<String>>,
}

impl Kills {
    /// # Errors
    /// If oomkill cannot be run.
    pub(crate) fn start() -> Result<Self> {
        let child = tools::start("oomkill", &["-e".into()], &[])?;
        Ok(Self::of(child))
    }

    /// Reads the output of a started oomkill from now on.
    pub(super) fn of(mut child: Child) -> Self {
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let (sender, objects) = channel();
        thread::spawn(move || stdout.map(|out| send_objects(BufReader::new(out), &sender)));
        Self {
            child: Tool(child),
            objects,
            messages: Some(thread::spawn(|| all_of(stderr))),
        }
    }

    /// Returns the pid of oomkill.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the kills since the last call.
    pub(crate) fn since_last(&mut self) -> Batch {
        if tools::has_ended(&mut self.child)
            && let Some(messages) = self.messages.take()
        {
            let messages = messages.join().unwrap_or_default();
            let reason = last_message(&messages, "oomkill").unwrap_or_default();
            eprintln!("memtriage: kills leave no report any more, as oomkill has ended: {reason}");
        }
        Batch::of(self.objects.try_iter())
    }
}

fn send_objects(lines: impl BufRead, sender: &Sender<Value>) {
    for line in lines.split(b'\n').map_while(Result::ok) {
        // oomkill prints only objects, so any other line is skipped.
        let Ok(object) = serde_json::from_slice(&line) else {
            continue;
        };
        if sender.send(object).is_err() {
            break;
        }
    }
}

impl Batch {
    /// Collects the kills among oomkill's objects.
    fn of(objects: impl Iterator<Item = Value>) -> Self {
        let mut batch = Self::default();
        for object in objects {
            match object["type"].as_str() {
                Some("kill") => batch.kills.push(ReportedKill {
                    pid: pid_of(&object["victim"]),
                    object,
                }),
                Some("also_killed") => batch.also_killed += 1,
                _ => {}
            }
        }
        batch
    }

    /// Returns the number of processes that were killed, as the kernel counts them.
    pub(crate) fn processes(&self) -> u64 {
        self.kills.len() as u64 + self.also_killed
    }
}

fn pid_of(victim: &Value) -> u32 {
    let pid = victim["pid"].as_u64();
    pid.and_then(|pid| pid.try_into().ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kills_are_told_from_other_objects() {
        let lines = b"{\"type\":\"kill\",\"pid\":3,\"victim\":{\"pid\":7}}\nx\n\
                      {\"type\":\"also_killed\",\"victim\":{\"pid\":8}}\n{\"type\":\"lost\"}\n";
        let (sender, objects) = channel();
        send_objects(&lines[..], &sender);
        let batch = Batch::of(objects.try_iter());
        let pids: Vec<u32> = batch.kills.iter().map(|kill| kill.pid).collect();
        assert_eq!(pids, [7]);
        assert_eq!(batch.processes(), 2);
    }

    #[test]
    fn a_process_counts_that_is_told_later_than_its_kill() {
        let later = serde_json::json!({"type": "also_killed", "victim": {"pid": 8}});
        let batch = Batch::of([later].into_iter());
        assert_eq!((batch.kills.len(), batch.processes()), (0, 1));
    }
}
