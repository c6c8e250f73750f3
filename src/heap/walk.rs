//! A process's heap, walked in as many images as it takes for one that is whole.

use anyhow::Result;

use crate::heap::blocks::{Coverage, Heap};
use crate::heap::capture::Request;
use crate::heap::glibc;
use crate::heap::image::Image;
use crate::heap::{jemalloc, mallocng};
use crate::print::text;

/// Images that are taken at most. A thread was in the middle of malloc in 2 of 300.
const TRIES: u32 = 3;

/// An image with what its allocators' structures say.
#[derive(Debug)]
pub struct Walked {
    /// The process, as it stood still.
    pub image: Image,
    /// The blocks, and whether these are all.
    pub heap: Heap,
    /// The arenas and free chunks of glibc's malloc, if it has been used.
    pub glibc: Option<glibc::Walk>,
    /// The extents of jemalloc, if it has been used.
    pub jemalloc: Option<jemalloc::Walk>,
    /// Images that have been taken until then.
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

    /// Takes images until the heap of one is complete, up to three. The last one is returned if none
    /// is, with the reason in its coverage.
    ///
    /// # Errors
    /// If no image can be taken, as [`Request::take`] says.
    pub fn take(request: &Request, tool: &str) -> Result<Self> {
        let mut walked = Self::of(request.take(tool)?);
        for images in 2..=TRIES {
            if !matches!(walked.heap.coverage, Coverage::Incomplete { .. }) {
                break;
            }
            // The copy is given back before there is another one.
            drop(walked);
            walked = Self::of(request.take(tool)?);
            walked.images = images;
        }
        Ok(walked)
    }

    /// What is to be said if the heap made no sense in any of the images that were taken.
    pub fn nonsense(&self) -> Option<String> {
        let Coverage::Incomplete { why, address } = &self.heap.coverage else {
            return None;
        };
        let place = address.map_or(String::new(), |address| format!(" at {address:#x}"));
        let images = match self.images {
            1 => "its image".to_owned(),
            images => format!("any of {images} images"),
        };
        Some(format!(
            "the heap of process {} makes no sense in {images}: {why}{place}; it is damaged, or not as its \
             allocator has it",
            self.image.pid
        ))
    }
}

/// What has a walk.
const KNOWN: &str = "glibc's malloc (2.26 to 2.43), musl's (1.2.1 and later) or jemalloc (5.3)";

/// What is said of a process without a heap that is known.
fn why_not_found(image: &Image) -> Coverage {
    if let Some(place) = glibc::broken_ring(image) {
        return Coverage::Incomplete {
            why: "the arenas of glibc's malloc do not lead back to the main one".into(),
            address: Some(place),
        };
    }
    let why = format!("no heap of {KNOWN} was found, and there is no walk of other allocators");
    Coverage::Unknown { why }
}

/// Says that there is no walk of an allocator that the process has loaded, if its file's name tells.
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
                "{path} is no jemalloc of a version that is known, and no heap of {KNOWN} was found"
            )
        }
        (name, path) => format!(
            "there is no walk of the heap of {name}, which it has loaded ({path}); no heap of {KNOWN} was found"
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::image::made::Made;

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
        ] {
            let mut made = Made::default();
            made.map(0x1000..0x3000, &format!("rw-p 00000000 fe:00 7 {file}"));
            made.put(0x1000, 7);
            match Walked::of(made.image()).heap.coverage {
                Coverage::Unknown { why } => assert!(why.contains(says), "{why}"),
                other => panic!("{file}: {other:?}"),
            }
        }
    }
}
