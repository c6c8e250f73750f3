//! Results of system calls, and errors by name.

use std::borrow::Cow;

use nix::errno::Errno;

/// Lowest error value: results from here up to -1 are errors, by the kernel's convention for every system call.
const LOWEST: i64 = -4095;

/// Splits the result of a system call, as its exit has it, into a value or an error (a positive errno).
///
/// # Errors
/// If the result is an error: with its number.
pub fn result(returned: i64) -> Result<u64, i32> {
    if (LOWEST..0).contains(&returned) {
        Err(-returned as i32)
    } else {
        Ok(returned.cast_unsigned())
    }
}

/// Returns the name of an errno: `EINVAL` for 22.
pub fn name(errno: i32) -> Cow<'static, str> {
    // Errors of the kernel's own. The first four become EINTR or a restarted call before the program sees them.
    match errno {
        512 => return "ERESTARTSYS".into(),
        513 => return "ERESTARTNOINTR".into(),
        514 => return "ERESTARTNOHAND".into(),
        516 => return "ERESTART_RESTARTBLOCK".into(),
        524 => return "ENOTSUPP".into(),
        _ => {}
    }
    match Errno::from_raw(errno) {
        Errno::UnknownErrno => format!("errno {errno}").into(),
        known => format!("{known:?}").into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_the_last_4095_values() {
        assert_eq!(result(-22), Err(22));
        assert_eq!(result(-4095), Err(4095));
        assert_eq!(result(0), Ok(0));
        assert_eq!(result(-4096), Ok(u64::MAX - 4095));
    }

    #[test]
    fn errors_have_names() {
        assert_eq!(name(libc::EINVAL), "EINVAL");
        assert_eq!(name(libc::ENOMEM), "ENOMEM");
        assert_eq!(name(512), "ERESTARTSYS");
        assert_eq!(name(4000), "errno 4000");
    }
}
