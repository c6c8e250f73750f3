//! Sections in full. All are from the same copies.

use anyhow::{Result, bail};
use memtools::heap::capture::Request;
use memtools::heap::walk::Walked;
use memtools::print::output::Output;
use memtools::process::container::{CgroupInfo, ProcessName};
use memtools::process::smaps;
use memtools::verdict::{self, HeapAnalysis, Settings, Suppressions, Untraced};

use crate::args::Sections;
use crate::block::BlockRow;
use crate::layout::HeapRow;
use crate::types;

/// Prints sections that need no verdict, from one copy.
///
/// # Errors
/// If no copy of the process can be taken, or its heap cannot be walked.
pub(crate) fn print(
    sections: Sections,
    settings: Settings<'_>,
    request: &Request<'_>,
    output: &mut Output,
) -> Result<()> {
    let cgroup_info = CgroupInfo::of_process(request.process.pid());
    let walked = Walked::take(request)?;
    let named = name(&walked, cgroup_info, settings.container);
    if let Some(nonsense) = walked.inconsistency() {
        bail!("{nonsense}");
    }
    if sections.layout {
        output.row(&layout(&walked, named.clone(), settings.top)?)?;
    }
    if sections.blocks {
        for block in walked.heap.blocks() {
            output.row(&BlockRow::of(block))?;
        }
    }
    if sections.types {
        types::print(walked, named, settings.top, output)?;
    }
    Ok(())
}

/// Prints sections with a verdict, from a copy, or from two if blocks are unreachable in the first. Returns the number
/// of leaks.
///
/// # Errors
/// If no copy of the process can be taken, or its heap cannot be judged. The layout is printed before.
pub(crate) fn print_judged(
    sections: Sections,
    settings: Settings<'_>,
    request: &Request<'_>,
    output: &mut Output,
) -> Result<u64> {
    let cgroup_info = CgroupInfo::of_process(request.process.pid());
    let mut seen = None;
    let case = HeapAnalysis::take_confirmed(request, &mut |walked| {
        if sections.layout {
            let named = name(walked, cgroup_info.clone(), settings.container);
            seen = Some(layout(walked, named, settings.top)?);
        }
        Ok(())
    });
    if let Some(row) = &seen {
        output.row(row)?;
    }
    let case = case?;
    if sections.blocks {
        for block in case.heap().blocks() {
            output.row(&BlockRow::of(block))?;
        }
    }
    if sections.types {
        let named = verdict::process_name(case.image(), cgroup_info, settings.container);
        types::print_named(&case, named, settings.top, output)?;
    }
    let suppressions = Suppressions::default();
    let report = case.report(&settings, &mut Untraced, &suppressions)?;
    report.print(sections.verdict, output)?;
    Ok(report.leaks())
}

/// Names the process of a walked heap.
pub(crate) fn name(walked: &Walked, cgroup_info: CgroupInfo, container: bool) -> ProcessName {
    verdict::process_name(&walked.image, cgroup_info, container)
}

/// Makes the row of where the memory is.
///
/// # Errors
/// If the mappings of the process cannot be read.
pub(crate) fn layout(walked: &Walked, name: ProcessName, top: usize) -> Result<HeapRow> {
    let mappings = smaps::read(walked.image.pid)?;
    Ok(HeapRow::of(walked, &mappings, name, top))
}
