//! Walk of a process's heaps, in as many images as it takes to get a complete one.

use anyhow::Result;

use crate::heap::blocks::{Coverage, Heap};
use crate::heap::capture::Request;
use crate::heap::glibc;
use crate::heap::image::Image;
use crate::heap::runtimes::Runtime;
use crate::heap::{jemalloc, mallocng};
use crate::print::text;

/// Largest number of images that are taken. In 2 of 300 images, a thread was in the middle of malloc.
const TRIES: u32 = 3;

/// Image with the heaps that the walk of its allocators' structures has found.
#[derive(Debug)]
pub struct Walked {
    /// Image of the stopped process.
    pub image: Image,
    /// Blocks of all allocators, and whether they are complete.
    pub heap: Heap,
    /// Arenas and chunks of glibc's malloc, if it has been used.
    pub glibc: Option<glibc::Walk>,
    /// Extents of jemalloc, if it has been used.
    pub jemalloc: Option<jemalloc::Walk>,
    /// Number of images that were taken.
    pub images: u32,
}

impl Walked {
    /// Walks the heaps of an image.
    pub fn of(image: Image) -> Self {
        let glibc = glibc::walk(&image);
        let libc = glibc.as_ref().map(glibc::Walk::heap);
        let libc = libc.or_else(|| mallocng::walk(&image));
        let (other, jemalloc) = jemalloc::walk(&image).unzip();
        let heap = match (libc, other) {
            (Some(one), Some(other)) => one.joined(other),
            (Some(heap), None) | (None, Some(heap)) => heap,
            (None, None) => Heap::new(Vec::new(), Coverage::Complete),
        };
        let nothing_found = heap.blocks().is_empty() && heap.coverage == Coverage::Complete;
        let is_known = !heap.allocators.is_empty();
        let heap = match not_walked(&image) {
            // The C library's malloc may have been set up, and not used.
            Some(why) if nothing_found => Heap::new(Vec::new(), Coverage::Unknown { why }),
            None if nothing_found && !is_known => Heap::new(Vec::new(), why_not_found(&image)),
            _ => heap,
        };
        Self {
            image,
            heap,
            glibc,
            jemalloc,
            images: 1,
        }
    }

    /// Takes up to three images, until the heap of one is not [`Coverage::Incomplete`]. If all are incomplete,
    /// returns the last one, with the reason in its coverage.
    ///
    /// # Errors
    /// If no image can be taken, as [`Request::take`] says.
    pub fn take(request: &Request) -> Result<Self> {
        let mut walked = Self::of(request.take()?);
        for images in 2..=TRIES {
            if !matches!(walked.heap.coverage, Coverage::Incomplete { .. }) {
                break;
            }
            // The copy is freed before another one is made.
            drop(walked);
            walked = Self::of(request.take()?);
            walked.images = images;
        }
        Ok(walked)
    }

    /// Returns why no heap was found, if there is none that can be walked.
    pub fn without_heap(&self) -> Option<&str> {
        match &self.heap.coverage {
            Coverage::Unknown { why } if self.heap.blocks().is_empty() => Some(why),
            _ => None,
        }
    }

    /// Returns a message if the heap was inconsistent in every image that was taken.
    pub fn inconsistency(&self) -> Option<String> {
        let Coverage::Incomplete { why, address } = &self.heap.coverage else {
            return None;
        };
        let place = address.map_or(String::new(), |address| format!(" at {address:#x}"));
        let images = match self.images {
            1 => "its image".to_owned(),
            images => format!("any of {images} images"),
        };
        Some(format!(
            "the heap of process {} is inconsistent in {images}: {why}{place}; it is damaged, or not as its \
             allocator has it",
            self.image.pid
        ))
    }
}

/// Supported allocators and their versions, as messages name them.
const KNOWN: &str = "glibc's malloc (2.26 to 2.43), musl's (1.2.1 and later) or jemalloc (5.3)";

/// Remedy for an allocator without a walk, as the end of a message.
const INSTEAD: &str = "; tracing works with it";

/// Returns the coverage of a process in which no known heap was found.
fn why_not_found(image: &Image) -> Coverage {
    if let Some(place) = glibc::broken_ring(image) {
        return Coverage::Incomplete {
            why: "the arenas of glibc's malloc do not lead back to the main one".into(),
            address: Some(place),
        };
    }
    let why = match Runtime::find(&image.areas) {
        Some(runtime) => format!(
            "no heap of {KNOWN} was found; another tool shows {}: {}",
            runtime.heap(),
            runtime.tool(image.pid)
        ),
        None => format!(
            "no heap of {KNOWN} was found, and there is no walk of other allocators{INSTEAD}"
        ),
    };
    Coverage::Unknown { why }
}

/// Returns a message if the process has loaded an allocator, by the name of its file, that cannot be walked.
fn not_walked(image: &Image) -> Option<String> {
    const NAMES: [&str; 3] = ["jemalloc", "tcmalloc", "mimalloc"];
    let mut loaded = image.areas.iter().filter_map(|area| {
        let path = area.mapping.path.to_str().filter(|_| area.has_file())?;
        let file = path.rsplit('/').next()?;
        let name = NAMES.iter().find(|name| file.contains(**name))?;
        Some((*name, text::escape(path)))
    });
    Some(match loaded.next()? {
        ("jemalloc", path) => {
            format!(
                "{path} is no jemalloc of a version that is known, and no heap of {KNOWN} was found{INSTEAD}"
            )
        }
        (name, path) => format!(
            "there is no walk of the heap of {name}, which it has loaded ({path}); no heap of {KNOWN} was found{INSTEAD}"
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::image::made::ImageBuilder;

    #[test]
    fn an_allocator_without_a_walk_is_named() {
        for (file, says) in [
            (
                "/lib/libtcmalloc_minimal.so.4",
                "heap of tcmalloc, which it has loaded (/lib/libtc",
            ),
            ("/lib/libmimalloc.so.2", "heap of mimalloc, which"),
            (
                "/lib/libjemalloc.so.1",
                "/lib/libjemalloc.so.1 is no jemalloc of a version",
            ),
            ("/lib/libc.so.6", "there is no walk of other allocators"),
            ("/lib/jvm/libjvm.so", "another tool shows the JVM's heap"),
        ] {
            let mut made = ImageBuilder::default();
            made.map(0x1000..0x3000, &format!("rw-p 00000000 fe:00 7 {file}"));
            made.put(0x1000, 7);
            match Walked::of(made.image()).heap.coverage {
                Coverage::Unknown { why } => assert!(why.contains(says), "{why}"),
                other => panic!("{file}: {other:?}"),
            }
        }
    }
}
