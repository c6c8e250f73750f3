// SPDX-License-Identifier: BSD-2-Clause
//! alloc-rust COUNT SIZE: boxes leaked by a Rust program, with the protocol of workload.h.
//!
//! With `--cfg own_allocator`, the program has the allocator of alloc_rust_own.rs.

#[cfg(own_allocator)]
extern crate alloc_rust_own;

use std::io::{BufRead, Write};

mod shop {
    #[inline(never)]
    pub fn leak_order(size: usize) -> &'static mut [u8] {
        vec![7; size].leak()
    }
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).expect("stdout");
}

fn wait_for_line() {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).expect("stdin");
}

fn main() {
    let mut numbers = std::env::args().skip(1).map(|arg| arg.parse::<usize>().expect("a count"));
    let (count, size) = (numbers.next().expect("COUNT"), numbers.next().expect("SIZE"));
    say(&format!("ready {}", std::process::id()));
    wait_for_line();
    for _ in 0..count {
        std::hint::black_box(shop::leak_order(size));
        drop(std::hint::black_box(vec![7u8; size]));
    }
    say("done");
    wait_for_line();
}
