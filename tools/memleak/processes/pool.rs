//! Functions of a program's own pool, as `--alloc` and `--free` name them:
//! `OBJECT:SYMBOL(size=arg1,ret=ptr)`.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, Error, Result, bail};

use super::signature::Signature;

/// A function, and the file that it is in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FunctionSpec {
    /// A path, or a name as -O takes it.
    pub(crate) object: PathBuf,
    pub(crate) symbol: String,
    pub(crate) signature: Signature,
}

/// A function that allocates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AllocSpec(pub(crate) FunctionSpec);

/// A function that frees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FreeSpec(pub(crate) FunctionSpec);

impl FromStr for AllocSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (object, symbol, fields) = split(text)?;
        let (mut size, mut count, mut old, mut result) = (None, None, None, None);
        for (key, value) in fields {
            let field = match key {
                "size" => &mut size,
                "count" => &mut count,
                "old" => &mut old,
                "ret" if value == "ptr" => continue,
                "ret" => &mut result,
                _ => bail!("'{key}' is none of size, count, old and ret"),
            };
            *field = Some(argument(value)?);
        }
        let size = size.context("it has no size, such as (size=arg1)")?;
        let mut signature = Signature::allocate(size);
        signature = count.map_or(signature, |count| signature.times(count));
        signature = old.map_or(signature, |old| signature.replacing(old));
        signature = result.map_or(signature, |result| signature.storing(result));
        Ok(Self(FunctionSpec {
            object,
            symbol,
            signature,
        }))
    }
}

impl FromStr for FreeSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (object, symbol, fields) = split(text)?;
        let mut block = 1;
        for (key, value) in fields {
            if key != "ptr" {
                bail!("'{key}' is not ptr");
            }
            block = argument(value)?;
        }
        Ok(Self(FunctionSpec {
            object,
            symbol,
            // The function may call others that are probed to give the memory back.
            signature: Signature::free(block).as_wrapper(),
        }))
    }
}

/// Keys and values in the parentheses.
type Fields<'a> = Vec<(&'a str, &'a str)>;

fn split(text: &str) -> Result<(PathBuf, String, Fields<'_>)> {
    let (function, fields) = match text.split_once('(') {
        Some((function, fields)) => {
            let fields = fields.strip_suffix(')').context("its ')' is missing")?;
            (function, fields)
        }
        None => (text, ""),
    };
    let (object, symbol) = function
        .rsplit_once(':')
        .filter(|(object, symbol)| !object.is_empty() && !symbol.is_empty())
        .context("it is not OBJECT:SYMBOL(...), such as server:pool_get(size=arg1)")?;
    let fields = fields.split(',').filter(|field| !field.is_empty());
    let fields = fields
        .map(|field| {
            let pair = field.trim().split_once('=');
            pair.with_context(|| format!("'{field}' has no '='"))
        })
        .collect::<Result<_>>()?;
    Ok((object.into(), symbol.to_owned(), fields))
}

/// Parses `arg1` to `arg6`, the arguments that are passed in registers.
fn argument(text: &str) -> Result<u8> {
    let number = text
        .strip_prefix("arg")
        .and_then(|number| number.parse().ok());
    number
        .filter(|number| (1..=6).contains(number))
        .with_context(|| format!("'{text}' is none of arg1 to arg6"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocates(text: &str) -> Result<Signature, String> {
        let parsed: Result<AllocSpec> = text.parse();
        parsed
            .map(|named| named.0.signature)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_function_of_a_pool() {
        let AllocSpec(named) = "/opt/a:b/server:pool_get(size=arg2)"
            .parse()
            .expect("valid");
        assert_eq!(named.object, PathBuf::from("/opt/a:b/server"));
        assert_eq!(named.symbol, "pool_get");
        assert_eq!(named.signature, Signature::allocate(2));
        assert_eq!(
            allocates("s:f(size=arg3, count=arg2,ret=arg1)"),
            Ok(Signature::allocate(3).times(2).storing(1))
        );
        assert_eq!(
            allocates("s:f(old=arg1,size=arg2,ret=ptr)"),
            Ok(Signature::allocate(2).replacing(1))
        );
        let FreeSpec(named) = "s:pool_put".parse().expect("valid");
        assert_eq!(named.signature, Signature::free(1).as_wrapper());
        let FreeSpec(named) = "s:pool_put(ptr=arg2)".parse().expect("valid");
        assert_eq!(named.signature, Signature::free(2).as_wrapper());
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, wrong) in [
            ("pool_get(size=arg1)", "it is not OBJECT:SYMBOL"),
            (":pool_get(size=arg1)", "it is not OBJECT:SYMBOL"),
            ("s:f", "it has no size"),
            ("s:f(size=arg1", "its ')' is missing"),
            ("s:f(size=arg7)", "'arg7' is none of arg1 to arg6"),
            ("s:f(size=16)", "'16' is none of arg1 to arg6"),
            ("s:f(size)", "'size' has no '='"),
            ("s:f(size=arg1,bytes=arg2)", "'bytes' is none of"),
        ] {
            let error = allocates(text).expect_err(text);
            assert!(error.contains(wrong), "{text}: {error}");
        }
        assert!("s:f(size=arg1)".parse::<FreeSpec>().is_err());
    }
}
