//! The guest's file system: a shell, tools with their libraries, modules with the modules that they need,
//! the programs under test, and a script that runs them.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::packages::Place;

/// A guest's file system while it is made.
pub(super) struct Initrd<'a> {
    place: &'a Place,
    tree: PathBuf,
    modules: BTreeSet<String>,
    /// Commands that load the modules, in this order.
    load: String,
    /// The tree that has the kernel of the modules.
    kernel: PathBuf,
}

impl<'a> Initrd<'a> {
    /// Starts a file system with a shell.
    pub(super) fn new(place: &'a Place) -> Result<Self> {
        let tree = place.file("initrd");
        if tree.exists() {
            fs::remove_dir_all(&tree)?;
        }
        for directory in ["bin", "dev", "lib", "lib64", "mnt", "proc", "sys", "tmp"] {
            fs::create_dir_all(tree.join(directory))?;
        }
        let initrd = Self {
            place,
            tree,
            modules: BTreeSet::new(),
            load: String::new(),
            kernel: place.root(),
        };
        initrd.add_program(&place.find_program("busybox")?, "busybox")?;
        Ok(initrd)
    }

    /// Takes modules of the kernel below another directory.
    pub(super) fn of_kernel(self, kernel: PathBuf) -> Self {
        Self { kernel, ..self }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.tree.join(name)
    }

    /// Adds a program without shared libraries.
    pub(super) fn add_program(&self, program: &Path, name: &str) -> Result<()> {
        fs::copy(program, self.tree.join("bin").join(name))
            .with_context(|| format!("copying {}", program.display()))?;
        Ok(())
    }

    /// Adds one of the packages' tools, and the libraries that it needs.
    pub(super) fn add_tool(&self, name: &str) -> Result<()> {
        self.add_installed_tool(&self.place.find_program(name)?, name)
    }

    /// The same for a tool of this machine.
    pub(super) fn add_installed_tool(&self, program: &Path, name: &str) -> Result<()> {
        self.add_program(program, name)?;
        let output = Command::new(LOADER)
            .arg("--list")
            .arg(program)
            .env("LD_LIBRARY_PATH", self.place.libraries())
            .output()
            .with_context(|| format!("starting {LOADER}"))?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success(), "{LOADER} --list {name}: {said}");
        for library in libraries(&said) {
            let file = library.file_name().context("a library has a name")?;
            fs::copy(library, self.tree.join("lib").join(file))
                .with_context(|| format!("copying {} for {name}", library.display()))?;
        }
        fs::copy(LOADER, self.tree.join(&LOADER[1..]))?;
        Ok(())
    }

    /// Adds a file of the packages at the same path: `usr/share/dbench/client.txt`.
    pub(super) fn add_file(&self, path: &str) -> Result<()> {
        let (from, to) = (self.place.root().join(path), self.tree.join(path));
        fs::create_dir_all(to.parent().context("a file lies in a directory")?)?;
        fs::copy(&from, to).with_context(|| format!("copying {}", from.display()))?;
        Ok(())
    }

    /// Adds a module behind those that it depends on. Whatever is not there is built into the kernel.
    pub(super) fn add_module(&mut self, name: &str, options: &str) -> Result<()> {
        let file = name.replace('_', "-");
        if !self.modules.insert(file.clone()) {
            return Ok(());
        }
        let Some(found) = find_module(&self.kernel.join("lib/modules"), &file)? else {
            return Ok(());
        };
        let module = unpacked(&found)?;
        for needed in needed_modules(&module) {
            self.add_module(&needed, "")?;
        }
        fs::write(self.tree.join(format!("{file}.ko")), module)?;
        self.load
            .push_str(format!("busybox insmod /{file}.ko {options}").trim_end());
        self.load.push('\n');
        Ok(())
    }

    /// Adds the script that runs once everything is mounted and loaded. Returns the packed file.
    pub(super) fn pack(&self, script: &str) -> Result<PathBuf> {
        let init = self.tree.join("init");
        fs::write(&init, format!("{BEGIN}{}{script}{END}", self.load))?;
        fs::set_permissions(init, fs::Permissions::from_mode(0o755))?;
        let image = self.place.file("initrd.img");
        let archive = "find . | bin/busybox cpio -o -H newc 2>/dev/null";
        let archive = Command::new("sh")
            .args(["-c", archive])
            .current_dir(&self.tree)
            .output()?;
        ensure!(archive.status.success(), "cpio: {}", archive.status);
        fs::write(&image, archive.stdout)?;
        Ok(image)
    }
}

/// The content of a module, which some kernels compress.
fn unpacked(module: &Path) -> Result<Vec<u8>> {
    if module.extension().is_some_and(|end| end == "ko") {
        return Ok(fs::read(module)?);
    }
    let unpacked = Command::new("xz").arg("-dc").arg(module).output()?;
    ensure!(unpacked.status.success(), "xz -dc {}", module.display());
    Ok(unpacked.stdout)
}

/// The libraries in the loader's list: `NAME => PATH (ADDRESS)`.
fn libraries(listed: &str) -> impl Iterator<Item = &Path> {
    let paths = listed.lines().filter_map(|line| line.split_once(" => "));
    paths.filter_map(|(_, found)| Some(Path::new(found.split_once(" (")?.0)))
}

/// The modules that a module depends on, by its entry `depends=NAME,NAME` between two zero bytes.
fn needed_modules(module: &[u8]) -> Vec<String> {
    let mut strings = module.split(|byte| *byte == 0);
    let names = strings.find_map(|string| string.strip_prefix(b"depends="));
    let names = String::from_utf8_lossy(names.unwrap_or_default()).into_owned();
    names
        .split(',')
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect()
}

/// Looks for a module below a directory. In names `_` and `-` are the same.
fn find_module(directory: &Path, name: &str) -> Result<Option<PathBuf>> {
    for entry in fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))? {
        let path = entry?.path();
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() {
            if let Some(found) = find_module(&path, name)? {
                return Ok(Some(found));
            }
        } else if file.trim_end_matches(".xz").replace('_', "-") == format!("{name}.ko") {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";
const BEGIN: &str = "\
#!/bin/busybox sh
export PATH=/bin
busybox mount -t proc proc /proc
busybox mount -t sysfs sysfs /sys
busybox mount -t devtmpfs devtmpfs /dev
busybox mount -t tmpfs tmpfs /tmp
";
const END: &str = "\
busybox poweroff -f
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_those_that_were_found_in_a_file() {
        let listed =
            "\tlinux-vdso.so.1 (0x7ff)\n\tlibm.so.6 => /a/libm.so.6 (0x7fe)\n\t/lib64/ld.so.2 (0x7fd)\n";
        assert_eq!(libraries(listed).collect::<Vec<_>>(), [Path::new("/a/libm.so.6")]);
    }

    #[test]
    fn module_says_what_it_needs() {
        assert_eq!(
            needed_modules(b"ELF\0license=GPL\0depends=dm-mod,libcrc32c\0name=x\0"),
            ["dm-mod", "libcrc32c"]
        );
        assert!(needed_modules(b"ELF\0depends=\0name=x\0").is_empty());
    }
}
