//! A process's heap, walked in as many images as it takes for one that is whole.

use anyhow::Result;

use crate::heap::blocks::{Coverage, Heap};
use crate::heap::capture::Request;
use crate::heap::glibc;
use crate::heap::image::Image;
use crate::heap::mallocng;

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
    /// Images that have been taken until then.
    pub images: u32,
}

impl Walked {
    /// Walks the heaps of an image.
    pub fn of(image: Image) -> Self {
        let glibc = glibc::walk(&image);
        let heap = match &glibc {
            Some(walk) => walk.heap(),
            None => mallocng::walk(&image).unwrap_or_else(|| {
                let why = "no heap of glibc's or musl's malloc was found, and there is no walk of other allocators";
                Heap::new(Vec::new(), Coverage::Unknown { why: why.into() })
            }),
        };
        Self {
            image,
            heap,
            glibc,
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
