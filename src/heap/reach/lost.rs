//! Grouping of lost blocks: which were lost first, which with them, and which the collector of CPython will free.

use std::mem;

use super::{Class, MIDDLE, Reach};
use crate::heap::blocks::Heap;
use crate::heap::image::Image;
use crate::heap::names::PythonObject;
use crate::heap::names::cycles::{self, CycleVerdict, Reference};

impl Reach {
    /// Groups lost blocks under leaders. Leaders are the blocks that no other lost block refers to, and objects of
    /// which CPython has counted more references than exist. Cycles of CPython's objects that these do not refer to
    /// are no loss. In the rings that are left then, the first block leads.
    pub(super) fn gather_lost(&mut self, image: &Image, heap: &Heap, python: &[PythonObject]) {
        let lost: Vec<u32> = (0..)
            .zip(&self.classes)
            .filter(|(_, class)| **class == Class::Unreachable)
            .map(|(block, _)| block)
            .collect();
        let judged = self.judge_python(image, heap, python, &lost);
        let mut is_held = vec![false; self.classes.len()];
        for &block in &lost {
            for to in self.references.of(block) {
                is_held[(to & !MIDDLE) as usize] = true;
            }
        }
        let will_be_freed = |block: u32| {
            let at = judged.binary_search_by_key(&block, |(block, _)| *block);
            let judged = at.ok().map(|at| judged[at].1);
            matches!(judged, Some(CycleVerdict::Cycle | CycleVerdict::Immortal))
        };
        let first = lost.iter().filter(|&&block| !is_held[block as usize]);
        let first = first.copied().filter(|&block| !will_be_freed(block));
        self.gather_all(first, Class::UnreachableVia);
        let counted = judged.iter().filter(|(_, of)| *of == CycleVerdict::Lost);
        self.gather_all(counted.map(|(block, _)| *block), Class::UnreachableVia);
        let cycles = lost.iter().copied().filter(|&block| will_be_freed(block));
        self.gather_all(cycles, Class::Cycle);
        self.gather_all(lost.iter().copied(), Class::UnreachableVia);
    }

    /// Makes each of these blocks the leader of the blocks that it refers to, unless another lost block leads it, or
    /// did.
    fn gather_all(&mut self, leaders: impl Iterator<Item = u32>, class: Class) {
        for leader in leaders {
            if self.classes[leader as usize] == Class::Unreachable && !self.leads[leader as usize] {
                if class == Class::Cycle {
                    self.classes[leader as usize] = class;
                } else {
                    self.leads[leader as usize] = true;
                }
                self.gather(leader, class);
            }
        }
    }

    fn gather(&mut self, leader: u32, class: Class) {
        let mut rest = vec![leader];
        while let Some(block) = rest.pop() {
            for edge in 0..self.references.of(block).len() {
                let to = self.references.block(block, edge);
                let at = to as usize;
                if to == leader || self.classes[at] != Class::Unreachable {
                    continue;
                }
                // A block that was lost first stays so, though a cycle refers to it.
                if self.leads[at] && class == Class::Cycle {
                    continue;
                }
                self.classes[at] = class;
                self.from[at] = block;
                // A block that was a leader already has gathered its blocks.
                if !mem::take(&mut self.leads[at]) {
                    rest.push(to);
                }
            }
        }
    }

    /// Judges lost objects of CPython by the references among lost blocks. Returns the results in order of blocks.
    fn judge_python(
        &self,
        image: &Image,
        heap: &Heap,
        python: &[PythonObject],
        lost: &[u32],
    ) -> Vec<(u32, CycleVerdict)> {
        let is_lost = |block: usize| self.classes.get(block) == Some(&Class::Unreachable);
        let objects = python.iter().filter(|object| is_lost(object.block));
        let objects: Vec<_> = objects.copied().collect();
        if objects.is_empty() {
            return Vec::new();
        }
        let mut references = Vec::new();
        for &from in lost {
            let from = from as usize;
            for (_, word) in image.words(heap.blocks()[from].range()) {
                if let Some((to, offset)) = heap.block_at(word)
                    && is_lost(to)
                    && !self.objects.is_link(to, offset)
                {
                    references.push(Reference { from, to, offset });
                }
            }
        }
        let judged = cycles::judge(&objects, &references);
        let blocks = objects.iter().map(|object| object.block as u32);
        blocks.zip(judged).collect()
    }
}
