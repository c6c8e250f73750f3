//! Programs on the entry and exit of kernel functions, loaded without a copy of the kernel's BTF.
//!
//! To find the number that a function has there, libbpf reads all of it: two copies for a moment, 9 MB,
//! more than all else that a tool holds. But all types are gone through anyway ([`kernel_types`]), and
//! libbpf asks for nothing more if a handler of the program's section tells it the number.
//!
//! [`kernel_types`]: crate::bpf::btf_subset

use std::collections::HashMap;
use std::ffi::{CStr, c_int, c_long};
use std::sync::{LazyLock, Mutex, Once};

use libbpf_rs::libbpf_sys::{
    BPF_PROG_TYPE_RAW_TRACEPOINT, BPF_PROG_TYPE_TRACING, BPF_TRACE_FENTRY, BPF_TRACE_FEXIT,
    bpf_prog_load_opts, bpf_program, bpf_program__section_name, bpf_program__set_type,
    libbpf_prog_handler_opts, libbpf_register_prog_handler,
};
use libbpf_rs::{Link, ProgramMut, ProgramType};

/// Functions of the kernel by name, and their numbers in its BTF.
static FUNCTIONS: LazyLock<Mutex<HashMap<Vec<u8>, u32>>> = LazyLock::new(Mutex::default);

/// Has libbpf ask [`tell_number`], for all objects that are opened from now on.
pub(crate) fn register() {
    static REGISTERED: Once = Once::new();
    REGISTERED.call_once(|| {
        let handler = libbpf_prog_handler_opts {
            sz: size_of::<libbpf_prog_handler_opts>() as _,
            prog_prepare_load_fn: Some(tell_number),
            ..Default::default()
        };
        for (section, attach_type) in [(c"fentry/", BPF_TRACE_FENTRY), (c"fexit/", BPF_TRACE_FEXIT)]
        {
            // libbpf reads BTF for whatever it takes to be a tracing program.
            let until_load = BPF_PROG_TYPE_RAW_TRACEPOINT;
            // SAFETY: libbpf copies both.
            unsafe {
                libbpf_register_prog_handler(section.as_ptr(), until_load, attach_type, &handler);
            }
        }
    });
}

/// The function that a program of this section is on.
pub(crate) fn target(section: &[u8]) -> Option<&[u8]> {
    let entry = section.strip_prefix(b"fentry/");
    entry.or_else(|| section.strip_prefix(b"fexit/"))
}

/// Keeps the number of a function.
pub(crate) fn learn(function: &[u8], number: u32) {
    if let Ok(mut functions) = FUNCTIONS.lock() {
        functions.entry(function.to_vec()).or_insert(number);
    }
}

/// The number of a function that was learned.
pub(crate) fn number(function: &[u8]) -> Option<u32> {
    FUNCTIONS.lock().ok()?.get(function).copied()
}

/// libbpf's last question before it loads a program.
unsafe extern "C" fn tell_number(
    program: *mut bpf_program,
    options: *mut bpf_prog_load_opts,
    _cookie: c_long,
) -> c_int {
    // SAFETY: both are libbpf's, which has called us for this; it changes neither meanwhile.
    unsafe {
        let section = CStr::from_ptr(bpf_program__section_name(program));
        let Some(number) = target(section.to_bytes()).and_then(number) else {
            return -libc::ENOENT;
        };
        (*options).attach_btf_id = number;
        bpf_program__set_type(program, BPF_PROG_TYPE_TRACING)
    }
}

/// Attaches a program as its section says. libbpf has forgotten the section of one whose type has
/// become another at load.
pub(crate) fn attach(program: &ProgramMut<'_>) -> libbpf_rs::Result<Link> {
    if program.prog_type() == ProgramType::Tracing {
        program.attach_trace()
    } else {
        program.attach()
    }
}
