//! Values of options, parsed, and the error of wrong usage.

use std::error::Error;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// Parses a number of seconds that is not 0, such as `10` or `0.5`.
///
/// # Errors
/// If the text is no such number, or out of bounds. The error is the text for the user.
pub fn seconds(text: &str) -> Result<Duration, String> {
    // A longer time than the kernel's timers take is as good as for ever.
    const MOST: f64 = 1e9;
    match text.parse() {
        Ok(seconds) if (1e-3..=MOST).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        Ok(_) => Err("must be from 0.001 to 1000000000 seconds".into()),
        Err(_) => Err("not a number of seconds, such as 10 or 0.5".into()),
    }
}

/// Parses a whole number that is not 0.
///
/// # Errors
/// If the text is no such number. The error is the text for the user.
pub fn count<N: FromStr + PartialOrd + Default>(text: &str) -> Result<N, String> {
    match text.parse::<N>() {
        Ok(number) if number > N::default() => Ok(number),
        _ => Err("must be a whole number above 0".into()),
    }
}

/// Parses a whole number, which may be 0.
///
/// # Errors
/// If the text is no such number. The error is the text for the user.
pub fn number<N: FromStr>(text: &str) -> Result<N, String> {
    text.parse()
        .map_err(|_| "must be a whole number, not too large".into())
}

/// Parses the id of a process or thread.
///
/// # Errors
/// If the text is no such id. The error is the text for the user.
pub fn pid(text: &str) -> Result<u32, String> {
    count(text).map_err(|_| "must be the number of a process, as ps -e shows it".into())
}

/// Parses a number of bytes, such as `4096`, `512K` or `1G`, in powers of 1024.
///
/// # Errors
/// If the text is no such number. The error is the text for the user.
pub fn bytes(text: &str) -> Result<u64, String> {
    let sizes = parse_size::Config::new().with_binary();
    sizes
        .parse_size(text)
        .map_err(|_| "not a number of bytes, such as 4096, 512K or 1G".into())
}

/// Error of arguments that contradict each other; exit status 2.
#[derive(Debug)]
pub struct UsageError(pub String);

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for UsageError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_may_have_a_fraction_but_not_be_none() {
        assert_eq!(seconds("10"), Ok(Duration::from_secs(10)));
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "-1", "NaN", "inf", "5s", "", "1e30"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn bytes_are_in_powers_of_1024() {
        assert_eq!(bytes("4093"), Ok(4093));
        assert_eq!((bytes("512K"), bytes("1G")), (Ok(512 << 10), Ok(1 << 30)));
        assert_eq!((bytes("4k"), bytes("4KiB")), (Ok(4 << 10), Ok(4 << 10)));
        for wrong in ["", "-1", "K", "1X"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
