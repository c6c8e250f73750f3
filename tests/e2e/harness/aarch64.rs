//! What tests know of arm64.

/// Name of the architecture in messages.
pub(crate) const NAME: &str = "arm64";

/// Folder of Debian's libraries.
pub(crate) const LIBRARIES: &str = "/usr/lib/aarch64-linux-gnu";

/// Path of the dynamic linker.
pub(crate) const LOADER: &str = "/lib/ld-linux-aarch64.so.1";

/// System calls of poll(2).
pub(crate) const POLL_CALLS: &[i64] = &[libc::SYS_ppoll];

/// System calls of epoll_wait(2).
pub(crate) const EPOLL_CALLS: &[i64] = &[libc::SYS_epoll_pwait];

/// Register in which workloads hold an address (`hold_in_one_register()` in tests/workload/wipe.h).
pub(crate) const HOLDING_REGISTER: &str = "x19";

/// Names of the flags of mmap(2) that the workload `mmap locked` adds.
pub(crate) const LOCKED: &[&str] = &["LOCKED"];

/// Parts of the folded kernel stack of a fault in a read of /dev/zero. The kernel's unwinder leaves out the caller of the
/// function that has faulted.
pub(crate) const ZEROES: &[&str] = &["vfs_read_[k];__arch_clear_user_[k]"];

const ASSEMBLY: &str = "the workload is in assembly of x86-64";
const MUSL: &str = "musl for arm64 is not among the workloads";
const IDLE: &str = "idle memory cannot be determined on arm64";
const JAVA: &str = "frames of HotSpot are not supported on arm64";
const JEMALLOC: &str = "Debian's jemalloc has pages of 64 KiB on arm64, and is not walked";
const OBJECTS: &str = "Python objects are not traced one by one on arm64";

/// Beginnings of the names of tests that cannot run on this architecture, each with the reason.
pub(crate) const NOT_HERE: &[(&str, &str)] = &[
    (
        "heapscan::growth::programs_of_allocators_are_told_apart",
        MUSL,
    ),
    (
        "heapscan::heap::a_heap_of_jemalloc_in_use_has_a_verdict",
        JEMALLOC,
    ),
    ("heapscan::heap::blocks_of_jemalloc_are_found", JEMALLOC),
    (
        "heapscan::heap::blocks_of_jemalloc_under_other_names_are_found",
        JEMALLOC,
    ),
    ("heapscan::heap::blocks_of_musl_are_found", MUSL),
    (
        "heapscan::heap::blocks_of_two_jemallocs_are_found",
        JEMALLOC,
    ),
    (
        "heapscan::heap::free_memory_of_jemalloc_is_as_it_says_itself",
        JEMALLOC,
    ),
    ("heapscan::idle::", IDLE),
    (
        "heapscan::screen::it_carries_the_programs_of_idle_alone",
        IDLE,
    ),
    ("heapscan::verdict::blocks_of_jemalloc_are_judged", JEMALLOC),
    (
        "hostile::memory_that_never_answers_keeps_no_tool_waiting",
        JAVA,
    ),
    ("java::", JAVA),
    ("java_names::", JAVA),
    ("lines::calls_inlined_without_end_harm_nobody", ASSEMBLY),
    (
        "lines::what_was_split_is_found",
        "the cross compiler's binutils have no dwp",
    ),
    ("memleak::a_32_bit_process_is_refused", ASSEMBLY),
    ("memleak::a_pool_of_the_programs_own", ASSEMBLY),
    ("memleak::a_probe_beside_another_tracers_counter", ASSEMBLY),
    ("memleak::another_libc_in_another_mount_namespace", MUSL),
    ("memleak::at_entries::a_pool_of_the_programs_own", ASSEMBLY),
    ("memleak::at_entries::forked_children_live", ASSEMBLY),
    ("memleak::at_entries::musl_in_the_program_is_exact", MUSL),
    (
        "memleak::attaching::a_file_that_is_swapped_takes_no_probes_elsewhere",
        ASSEMBLY,
    ),
    (
        "memleak::attaching::a_symbol_where_no_instruction_is_is_left_out",
        ASSEMBLY,
    ),
    ("memleak::forked_children_live", ASSEMBLY),
    ("memleak::musl_in_the_program_is_exact", MUSL),
    (
        "memleak::processes::a_command_behind_a_script_is_seen_from_its_first_call",
        MUSL,
    ),
    ("mmapsnoop::calls_of_32_bit_programs", ASSEMBLY),
    ("python::each_thread_on_musl_has_its_frames", MUSL),
    (
        "python::objects_in_use_at_the_end_are_those_that_python_has",
        OBJECTS,
    ),
    (
        "running::what_a_command_starts_goes_on_when_the_tool_is_killed",
        MUSL,
    ),
    ("unwind::a_static_program_of_another_libc", MUSL),
    ("unwind::c_that_is_called_from_go", ASSEMBLY),
    (
        "unwind::calls_that_are_bound_lazily",
        "linkers make no unwind information for a PLT of arm64",
    ),
    (
        "unwind::every_instruction",
        "user mode of arm64 cannot step through its own code",
    ),
    ("unwind::hotspot_s_generated_code_ends_a_stack", JAVA),
];
