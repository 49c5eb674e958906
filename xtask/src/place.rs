//! The places of files: the root of the project, the build directory, and the tools of the machine.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

/// The directory of the workspace's `Cargo.toml`.
pub(crate) fn root() -> PathBuf {
    // Cargo sets this variable at run time, so a checkout that was moved or copied is found where
    // it is now.
    let own = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_else(|_| env!("CARGO_MANIFEST_DIR").to_owned());
    Path::new(&own)
        .parent()
        .expect("xtask lies in the root")
        .to_owned()
}

/// Cargo's build directory, however it was chosen: this program was built into it.
///
/// # Errors
/// If this program's own path cannot be read.
pub(crate) fn target_dir() -> Result<PathBuf> {
    let own = std::env::current_exe().context("finding the build directory")?;
    let target = own
        .parent()
        .and_then(Path::parent)
        .context("this program lies outside a build directory")?;
    Ok(target.to_owned())
}

/// `cargo` in the root, the same one that runs this program.
pub(crate) fn cargo(words: &str) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.args(words.split_whitespace()).current_dir(root());
    // Cargo sets these for what it runs; an inner cargo would mistake them for its own.
    for name in ["CARGO_MANIFEST_DIR", "CARGO_MANIFEST_PATH", "CARGO_PKG_NAME"] {
        command.env_remove(name);
    }
    command
}

/// [`cargo`] for programs that need no shared library. They are built for a named target, so that the flag is not for
/// macros and build scripts, and lie in a directory of its name.
pub(crate) fn cargo_static(words: &str) -> Command {
    let mut command = cargo(words);
    command
        .args(["--target", STATIC_TRIPLE])
        .env("RUSTFLAGS", "-C target-feature=+crt-static");
    command
}

/// This machine, in Cargo's words.
pub(crate) const STATIC_TRIPLE: &str = if cfg!(target_arch = "aarch64") {
    "aarch64-unknown-linux-gnu"
} else {
    "x86_64-unknown-linux-gnu"
};

/// Whether cargo has the subcommand `name` installed.
pub(crate) fn has_cargo_command(name: &str) -> bool {
    let output = cargo(name).arg("--version").output();
    output.is_ok_and(|output| output.status.success())
}

/// Whether the source of the standard library is installed, from which the sanitizers' chores build
/// it.
pub(crate) fn rust_source_is_installed() -> bool {
    let output = Command::new("rustc")
        .args(["--print", "sysroot"])
        .current_dir(root())
        .output();
    output.is_ok_and(|output| {
        let sysroot = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        sysroot
            .join("lib/rustlib/src/rust/library/std/Cargo.toml")
            .is_file()
    })
}
