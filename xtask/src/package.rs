//! Makes what a host installs: a Debian package, and a tarball of the same tree with its checksum. `tree` lays the
//! files out, `licences` collects those of dependencies, `image` has a static program for containers, `test` installs the
//! package in a system of its own, `systemd` runs it in one that is booted.

mod image;
mod licences;
mod systemd;
mod test;
mod tree;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::place::{cargo, root, target_dir};
use crate::steps::{Steps, run_shown};
use blkmq_testkit::tools::find;
use tree::Tree;

/// What is made, in the build directory.
pub(crate) struct Package {
    pub(crate) deb: PathBuf,
    pub(crate) tarball: PathBuf,
}

/// Makes the package of a release build, or of the program that `BLKMQ_BIN` names, and tests it if that is asked for.
///
/// # Errors
/// A tool is missing, or a step fails.
pub(crate) fn run(steps: &mut Steps, is_tested: bool, upgrades: Option<u32>, has_image: bool) -> Result<()> {
    for tool in ["dpkg-deb", "gzip", "tar", "sha256sum", "strip"] {
        ensure!(find(tool).is_some(), "not installed: {tool}");
    }
    let program = program(steps)?;
    let package = steps.time("package", || make(&program))?;
    println!("    {}\n    {}", package.deb.display(), package.tarball.display());
    if has_image {
        image::run(steps, &target_dir()?.join("package"))?;
    }
    if is_tested {
        test::run(steps, &package)?;
    }
    match upgrades {
        Some(upgrades) => systemd::run(steps, &package, upgrades),
        None => Ok(()),
    }
}

/// The program alone: its laboratory is never installed.
fn program(steps: &mut Steps) -> Result<PathBuf> {
    if let Some(program) = std::env::var_os("BLKMQ_BIN") {
        return Ok(program.into());
    }
    steps.run("release build", &mut cargo("build --release -p blkmq --bins"))?;
    Ok(target_dir()?.join("release/blkmq"))
}

fn make(program: &Path) -> Result<Package> {
    let out = target_dir()?.join("package");
    let _ = fs::remove_dir_all(&out);
    let tree = Tree::make(&out.join("root"), program)?;
    let (version, arch) = (version()?, output("dpkg --print-architecture")?);
    tree.write_changelog(&version, &epoch()?)?;
    tree.write_control(&version, &arch)?;
    let deb = out.join(format!("blkmq_{version}_{arch}.deb"));
    let mut build = Command::new("dpkg-deb");
    build
        .args(["--root-owner-group", "-Zxz", "--build"])
        .arg(tree.root())
        .arg(&deb);
    run_shown(build.env("SOURCE_DATE_EPOCH", epoch()?))?;
    let tarball = out.join(format!("blkmq-{version}-{arch}.tar.xz"));
    let mut pack = Command::new("tar");
    pack.args([
        "--sort=name",
        "--owner=0",
        "--group=0",
        "--exclude=./DEBIAN",
        "-cJf",
    ])
    .arg(&tarball);
    pack.arg(format!("--mtime=@{}", epoch()?))
        .arg("-C")
        .arg(tree.root())
        .arg(".");
    run_shown(&mut pack)?;
    for file in [&deb, &tarball] {
        let name = file.file_name().context("it has a name")?;
        let sum = Command::new("sha256sum").current_dir(&out).arg(name).output()?;
        ensure!(sum.status.success(), "sha256sum failed");
        fs::write(format!("{}.sha256", file.display()), sum.stdout)?;
    }
    Ok(Package { deb, tarball })
}

/// The version of the workspace, and the time and the name of the commit: a later commit is a newer package.
fn version() -> Result<String> {
    let id = output("cargo pkgid -p blkmq")?;
    let version = id.rsplit(['@', '#']).next().context("it has a version")?;
    let commit = output("git log -1 --format=%cd.%h --date=format:%Y%m%d%H%M%S --abbrev=8")?;
    Ok(format!("{version}+git{commit}"))
}

/// The time of the commit, in seconds since 1970: the same commit makes the same package.
fn epoch() -> Result<String> {
    output("git log -1 --format=%ct")
}

/// What a command of the root prints.
fn output(words: &str) -> Result<String> {
    let mut parts = words.split_whitespace();
    let mut command = Command::new(parts.next().context("a program")?);
    let done = command
        .args(parts)
        .current_dir(root())
        .output()
        .with_context(|| words.to_owned())?;
    ensure!(
        done.status.success(),
        "`{words}`: {}",
        String::from_utf8_lossy(&done.stderr)
    );
    Ok(String::from_utf8(done.stdout)?.trim().to_owned())
}
