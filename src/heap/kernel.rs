//! Words that the kernel keeps for a process and hands back to it later. Such a word can be a program's only copy of
//! a block's address.
//!
//! /proc shows the words of epoll, and those of POSIX timers where the kernel has CONFIG_CHECKPOINT_RESTORE, as
//! kernels of distributions have. It does not show the words of io_uring, of aio, and of queued signals.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::process::proc;

/// Word that the kernel keeps for a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelWord {
    /// Owner of the word: `epoll_event.data of file descriptor` or `sigev_value of timer`.
    pub what: &'static str,
    /// Number of the file descriptor or of the timer.
    pub number: u32,
    /// The word.
    pub word: u64,
}

/// Limit on the bytes that are read from a file. 100,000 watched file descriptors take 8 MB.
const MAX_BYTES: u64 = 64 << 20;

/// Returns the words that the kernel keeps for a process now. A file that cannot be read yields none.
pub fn words(pid: u32) -> Vec<KernelWord> {
    let mut words = timers(&read(&proc::file(pid, "timers")));
    for (number, target) in proc::open_files(pid) {
        if target.as_os_str() == "anon_inode:[eventpoll]" {
            let text = read(&proc::file(pid, &format!("fdinfo/{number}")));
            words.extend(epoll(&text).map(|word| KernelWord {
                what: "epoll_event.data of file descriptor",
                number,
                word,
            }));
        }
    }
    words
}

fn read(path: &Path) -> String {
    let mut text = String::new();
    if let Ok(file) = File::open(path) {
        // Text that was read before an error is used, too.
        let _ = file.take(MAX_BYTES).read_to_string(&mut text);
    }
    text
}

/// Returns the words that belong to the files an epoll instance watches:
/// `tfd: 5 events: 19 data: 7f00c0de0010 pos:0 ino:61af sdev:7`.
fn epoll(fdinfo: &str) -> impl Iterator<Item = u64> {
    fdinfo.lines().filter_map(|line| {
        let mut fields = line.strip_prefix("tfd:")?.split_whitespace();
        fields.find(|field| *field == "data:")?;
        u64::from_str_radix(fields.next()?, 16).ok()
    })
}

/// Returns the words of POSIX timers: `ID: 2`, then `signal: 60/00007fff86e452a8`.
fn timers(text: &str) -> Vec<KernelWord> {
    let (mut words, mut number) = (Vec::new(), 0);
    for line in text.lines() {
        if let Some(id) = line.strip_prefix("ID: ") {
            number = id.trim().parse().unwrap_or_default();
        }
        let word = line
            .strip_prefix("signal: ")
            .and_then(|signal| signal.split_once('/'))
            .and_then(|(_, word)| u64::from_str_radix(word.trim(), 16).ok());
        words.extend(word.map(|word| KernelWord {
            what: "sigev_value of timer",
            number,
            word,
        }));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_timers_and_of_epoll_are_read() {
        let text = "ID: 1\nsignal: 60/00007fff86e452a8\nnotify: signal/pid.2634\nClockID: 0\n\
                    ID: 2\nsignal: 0/0000000000000001\nnotify: none/pid.2634\n";
        let words: Vec<_> = timers(text)
            .iter()
            .map(|kept| (kept.number, kept.word))
            .collect();
        assert_eq!(words, [(1, 0x7fff_86e4_52a8), (2, 1)]);
        let text = "pos:\t0\nflags:\t02\nmnt_id:\t15\nino:\t1057\n\
                    tfd:        5 events:       19 data:     7f00c0de0010  pos:0 ino:61af sdev:7\n\
                    tfd:        6 events:       19 data: ffffffffffffffff\ntfd: 7\n";
        let words: Vec<_> = epoll(text).collect();
        assert_eq!(words, [0x7f00_c0de_0010, u64::MAX]);
    }
}
