//! Loading of programs on the entry and exit of kernel functions (fentry, fexit) without a copy of the kernel's BTF.
//!
//! To find the BTF id of a function, libbpf reads the kernel's whole BTF: two copies for a moment, 9 MB, more than
//! all other memory of a tool. But a tool walks all types anyway ([`btf_subset`]). libbpf needs nothing more if a
//! handler of the program's section passes the id to it.
//!
//! [`btf_subset`]: crate::bpf::btf_subset

use std::collections::HashMap;
use std::ffi::{CStr, c_int, c_long};
use std::sync::{LazyLock, Mutex, Once};

use libbpf_rs::libbpf_sys::{
    BPF_PROG_TYPE_RAW_TRACEPOINT, BPF_PROG_TYPE_TRACING, BPF_TRACE_FENTRY, BPF_TRACE_FEXIT,
    bpf_prog_load_opts, bpf_program, bpf_program__section_name, bpf_program__set_type,
    libbpf_prog_handler_opts, libbpf_register_prog_handler,
};
use libbpf_rs::{Link, ProgramMut, ProgramType};

/// BTF ids of the kernel's functions, by name.
static FUNCTIONS: LazyLock<Mutex<HashMap<Vec<u8>, u32>>> = LazyLock::new(Mutex::default);

/// Registers [`set_attach_btf_id`] with libbpf, for all objects that are opened from now on.
pub(crate) fn register() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        let handler = libbpf_prog_handler_opts {
            sz: size_of::<libbpf_prog_handler_opts>() as _,
            prog_prepare_load_fn: Some(set_attach_btf_id),
            ..Default::default()
        };
        for (section, attach_type) in [(c"fentry/", BPF_TRACE_FENTRY), (c"fexit/", BPF_TRACE_FEXIT)]
        {
            // libbpf reads the kernel's BTF if a program has the type tracing, so the type is set only at load.
            let until_load = BPF_PROG_TYPE_RAW_TRACEPOINT;
            // SAFETY: libbpf copies the section's name and the handler.
            unsafe {
                libbpf_register_prog_handler(section.as_ptr(), until_load, attach_type, &handler);
            }
        }
    });
}

/// Returns the kernel function that a program of this section attaches to; None if the section is neither fentry nor
/// fexit.
pub(crate) fn target(section: &[u8]) -> Option<&[u8]> {
    let entry = section.strip_prefix(b"fentry/");
    entry.or_else(|| section.strip_prefix(b"fexit/"))
}

/// Stores the BTF id of a function.
pub(crate) fn set_btf_id(function: &[u8], number: u32) {
    if let Ok(mut functions) = FUNCTIONS.lock() {
        functions.entry(function.to_vec()).or_insert(number);
    }
}

/// Returns the BTF id that [`set_btf_id`] has stored for a function.
pub(crate) fn number(function: &[u8]) -> Option<u32> {
    FUNCTIONS.lock().ok()?.get(function).copied()
}

/// Callback that tells libbpf the BTF id of a program's function, just before libbpf loads the program.
unsafe extern "C" fn set_attach_btf_id(
    program: *mut bpf_program,
    options: *mut bpf_prog_load_opts,
    _cookie: c_long,
) -> c_int {
    // SAFETY: libbpf has passed both pointers for this call, and does not change their objects meanwhile.
    unsafe {
        let section = CStr::from_ptr(bpf_program__section_name(program));
        let Some(number) = target(section.to_bytes()).and_then(number) else {
            return -libc::ENOENT;
        };
        (*options).attach_btf_id = number;
        bpf_program__set_type(program, BPF_PROG_TYPE_TRACING)
    }
}

/// Attaches a program as its section says. libbpf forgets the section of a program whose type changes at load, so
/// fentry and fexit programs are attached explicitly.
pub(crate) fn attach(program: &ProgramMut<'_>) -> libbpf_rs::Result<Link> {
    if program.prog_type() == ProgramType::Tracing {
        program.attach_trace()
    } else {
        program.attach()
    }
}
