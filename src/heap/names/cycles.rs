//! Judgement of unreachable objects of CPython: which were lost, and which the garbage collector will free.
//!
//! A reference count is the number of references to an object. For objects in a cycle that nothing refers to, this
//! number of references is found in the unreachable blocks: the next collection frees them. An object with a higher
//! count has references that were counted and never given up, as by an extension that owes a `Py_DECREF`. This object
//! and what it refers to stay for ever.

use std::collections::HashMap;

use crate::heap::names::PythonObject;

/// Smallest count of an immortal object: 3.12 and later give these objects half of all that 32 bits hold, or more.
const IMMORTAL: u32 = 1 << 30;

/// Reason why an unreachable object has not been freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CycleVerdict {
    /// More references to the object were counted than exist.
    Lost,
    /// A lost object refers to the object, by way of others or not.
    ViaLost,
    /// All references to the object are from other unreachable objects: it waits for the collector.
    Cycle,
    /// The object is never freed, whoever refers to it.
    Immortal,
}

/// Word in an unreachable block that points into an unreachable block. Words before an object in its block
/// ([`PythonObject::head`]) do not count: they are the collector's list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reference {
    /// Number of the block that contains the word.
    pub from: usize,
    /// Number of the block that the word points into.
    pub to: usize,
    /// Offset in that block, in bytes.
    pub offset: u64,
}

/// Judges unreachable objects by all references among unreachable blocks. `references` has one for each word.
pub fn judge(objects: &[PythonObject], references: &[Reference]) -> Vec<CycleVerdict> {
    let by_block: HashMap<usize, usize> = (0..)
        .zip(objects)
        .map(|(number, object)| (object.block, number))
        .collect();
    let mut found = vec![0_u32; objects.len()];
    let mut targets: HashMap<usize, Vec<usize>> = HashMap::new();
    for reference in references {
        targets
            .entry(reference.from)
            .or_default()
            .push(reference.to);
        if let Some(&number) = by_block.get(&reference.to)
            && objects[number].head == reference.offset
        {
            found[number] = found[number].saturating_add(1);
        }
    }
    let counted = objects.iter().zip(&found);
    let mut judged: Vec<_> = counted
        .map(|(object, &found)| match object.references {
            IMMORTAL.. => CycleVerdict::Immortal,
            counted if counted > found => CycleVerdict::Lost,
            _ => CycleVerdict::Cycle,
        })
        .collect();
    let lost = objects
        .iter()
        .zip(&judged)
        .filter(|(_, judged)| **judged == CycleVerdict::Lost);
    let mut rest: Vec<usize> = lost.map(|(object, _)| object.block).collect();
    while let Some(block) = rest.pop() {
        // Each block's references are followed once.
        for target in targets.remove(&block).unwrap_or_default() {
            if let Some(&number) = by_block.get(&target)
                && judged[number] == CycleVerdict::Cycle
            {
                judged[number] = CycleVerdict::ViaLost;
            }
            rest.push(target);
        }
    }
    judged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(block: usize, references: u32) -> PythonObject {
        PythonObject {
            block,
            head: 16,
            references,
            collected: true,
        }
    }

    fn reference(from: usize, to: usize) -> Reference {
        Reference {
            from,
            to,
            offset: 16,
        }
    }

    #[test]
    fn what_is_lost_has_more_references_than_there_are() {
        use CycleVerdict::{Cycle, Immortal, Lost, ViaLost};
        // 0 and 1 are a cycle, with 2 on it. 3 is lost; its dictionary, 4, is no object, and refers to 5. 6 is a cycle
        // of its own that 5 refers to. 7 is immortal. A word into the middle of 8 is no reference.
        let objects = [
            (0, 1),
            (1, 1),
            (2, 2),
            (3, 1),
            (5, 1),
            (6, 2),
            (7, u32::MAX),
            (8, 1),
        ];
        let objects = objects.map(|(block, references)| object(block, references));
        let edges = [
            (0, 1),
            (1, 0),
            (0, 2),
            (1, 2),
            (3, 4),
            (4, 5),
            (5, 6),
            (6, 6),
            (0, 7),
        ];
        let mut references: Vec<_> = edges
            .iter()
            .map(|&(from, to)| reference(from, to))
            .collect();
        references.push(Reference {
            from: 1,
            to: 8,
            offset: 24,
        });
        let expected = [Cycle, Cycle, Cycle, Lost, ViaLost, ViaLost, Immortal, Lost];
        assert_eq!(judge(&objects, &references), expected);
    }
}
