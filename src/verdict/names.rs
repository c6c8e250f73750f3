//! Names of roots, at which the chains of references begin that hold blocks.

use std::collections::HashMap;

use crate::code::elf;
use crate::heap::image::Image;
use crate::heap::roots::{self, ModuleSizes, Root, RootPlace};
use crate::print::demangle::demangle;
use crate::print::text;
use crate::process::mapped_file::MappedFile;

use super::judge;

/// Names in the files that roots are in.
#[derive(Default)]
pub struct RootNames {
    modules: ModuleSizes,
    /// Variables by file and offset: name, and offset within the variable.
    variables: HashMap<(Vec<u8>, u64), (String, u64)>,
}

impl RootNames {
    /// Reads the names in the files of a process that these roots are in.
    pub fn of(image: &Image, roots: impl Iterator<Item = Root>) -> Self {
        let places: Vec<_> = roots.map(|root| roots::place(image, root)).collect();
        let in_modules = places.iter().filter_map(|place| match place {
            RootPlace::Module { path, offset } => Some((path.as_slice(), *offset)),
            _ => None,
        });
        let mut names = Self::default();
        for (path, offsets) in judge::wanted_names(in_modules) {
            let mut areas = image.areas.iter();
            let area = areas.find(|area| area.has_file() && area.name() == path);
            let file = area.map(|area| MappedFile::open(image.pid, &area.mapping));
            // A file that cannot be read, or is no program, has no names and no bss.
            let Some(Ok(file)) = file else { continue };
            let bytes = elf::loaded_bytes(file.file()).unwrap_or_default();
            names.modules.0.insert(path.clone(), bytes);
            let found = elf::variables(file.file(), &offsets).unwrap_or_default();
            let found = found
                .into_iter()
                .map(|(at, name)| ((path.clone(), at), name));
            names.variables.extend(found);
        }
        names
    }

    /// Returns the name of a root.
    pub(super) fn root(&self, image: &Image, root: Option<Root>) -> String {
        self.label(image, root, |at| format!("+{at:#x}"))
    }

    /// Returns the name of a root without its offset in a variable: all elements of an array are one holder.
    pub fn variable(&self, image: &Image, root: Option<Root>) -> String {
        self.label(image, root, |_| String::new())
    }

    /// Returns the name of a root. `within` writes its offset in a variable.
    fn label(&self, image: &Image, root: Option<Root>, within: fn(u64) -> String) -> String {
        let Some(root) = root else {
            return "nothing: unreachable".into();
        };
        match self.modules.place(image, root) {
            RootPlace::Register { tid, name } => format!("register {name} of thread {tid}"),
            RootPlace::Kernel { what, number } => format!("the kernel, {what} {number}"),
            RootPlace::Stack { tid, offset } => format!("stack of thread {tid}, sp{offset:+}"),
            RootPlace::ThreadLocal { tid, offset } => {
                format!("thread-local storage of thread {tid}, {offset:+}")
            }
            RootPlace::Module { path, offset } => {
                let file = path.rsplit(|&byte| byte == b'/').next().unwrap_or(&path);
                let file = text::escape_bytes(file);
                match self.variables.get(&(path, offset)) {
                    Some((name, at)) => {
                        let name = text::display_name(&demangle(name));
                        let at = if *at == 0 { String::new() } else { within(*at) };
                        format!("global {file}`{name}{at}")
                    }
                    None => format!("global {file}+{offset:#x}"),
                }
            }
            RootPlace::Other {
                start,
                offset,
                name,
            } => {
                let name = text::escape_bytes(&name);
                let space = if name.is_empty() { "" } else { " " };
                format!("memory {start:#x}+{offset:#x}{space}{name}")
            }
        }
    }
}
