//! The packages of the guest's emulator, kernel and tools: Debian 12's and its backports, from the mirror
//! that this machine uses, unpacked below the build directory. Nothing is installed.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::place::target_dir;
use crate::steps::run_shown;
use blkmq_testkit::tools::find;

/// The directory of the packages, their contents, and the guest's files.
pub(super) struct Place(PathBuf);

impl Place {
    pub(super) fn find() -> Result<Self> {
        Ok(Self(target_dir()?.join("guest")))
    }

    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub(super) fn root(&self) -> PathBuf {
        self.0.join("root")
    }

    pub(super) fn is_complete(&self) -> bool {
        let filled = fs::read_to_string(self.0.join("complete"));
        filled.is_ok_and(|packages| packages == PACKAGES)
    }

    /// The directories in which a program of the packages looks for libraries before it uses this
    /// machine's.
    pub(super) fn libraries(&self) -> OsString {
        let directories = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];
        let paths = directories.map(|directory| self.root().join(directory));
        std::env::join_paths(paths).expect("a build directory has no colon in its path")
    }

    /// The program with this name among the packages.
    pub(super) fn find_program(&self, name: &str) -> Result<PathBuf> {
        let directories = ["usr/bin", "usr/sbin", "bin", "sbin"];
        let mut paths = directories
            .map(|directory| self.root().join(directory).join(name))
            .into_iter();
        let found = paths.find(|path| path.is_file());
        found.with_context(|| format!("{name} is in none of the guest's packages"))
    }

    /// Downloads and unpacks what a guest needs.
    pub(super) fn fill(&self) -> Result<()> {
        ensure!(
            std::env::consts::ARCH == "x86_64",
            "the guest is one for x86_64 machines"
        );
        for tool in ["apt-get", "apt-cache", "dpkg", "timeout", "xz", "mkfs.ext4"] {
            ensure!(find(tool).is_some(), "there is no {tool} here");
        }
        for directory in ["lists/partial", "debs/partial", "cache", "root"] {
            fs::create_dir_all(self.0.join(directory))?;
        }
        let mirror = mirror()?;
        let sources = SUITES.map(|suite| format!("deb {mirror} {suite} main\n"));
        fs::write(self.0.join("sources.list"), sources.concat())?;
        fs::write(self.0.join("preferences"), PREFERENCES)?;
        run_shown(&mut self.apt("apt-get", "update -qq"))?;
        // The libraries that are missing here, and then the packages that are needed even if this
        // machine has them installed.
        let libraries = format!("install -qq -y --download-only --no-install-recommends {WITH_LIBRARIES}");
        run_shown(&mut self.apt("apt-get", &libraries))?;
        let packages = format!("download -qq {PACKAGES} {}", self.kernel_package()?);
        run_shown(self.apt("apt-get", &packages).current_dir(self.0.join("debs")))?;
        for package in fs::read_dir(self.0.join("debs"))? {
            let package = package?.path();
            if package.extension().is_some_and(|end| end == "deb") {
                run_shown(Command::new("dpkg").arg("-x").arg(package).arg(self.root()))?;
            }
        }
        let version = self.emulator_version()?;
        println!("    {version}");
        Ok(fs::write(self.0.join("complete"), PACKAGES)?)
    }

    /// One of apt's programs, with its own lists, archives and sources, so that it changes nothing
    /// on the machine.
    fn apt(&self, program: &str, words: &str) -> Command {
        let mut command = Command::new(program);
        for (option, file) in [
            ("Dir::Etc::sourcelist", "sources.list"),
            ("Dir::Etc::sourceparts", "/dev/null"),
            ("Dir::Etc::preferences", "preferences"),
            ("Dir::Etc::preferencesparts", "/dev/null"),
            ("Dir::State::lists", "lists"),
            ("Dir::Cache", "cache"),
            ("Dir::Cache::archives", "debs"),
        ] {
            command.args(["-o", &format!("{option}={}", self.0.join(file).display())]);
        }
        command.args(["-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User=root"]);
        command.args(words.split_whitespace());
        command
    }

    /// The package that the newest kernel is in.
    fn kernel_package(&self) -> Result<String> {
        let output = self
            .apt("apt-cache", "depends linux-image-cloud-amd64")
            .output()?;
        kernel_in(&String::from_utf8_lossy(&output.stdout))
    }

    /// The kernel of this machine's own Debian, for an emulator of its own, unpacked in a directory of its own.
    pub(super) fn own_kernel(&self) -> Result<PathBuf> {
        let directory = self.0.join("own-kernel");
        let unpacked = directory.join("root");
        if unpacked.join("boot").is_dir() {
            return Ok(unpacked);
        }
        fs::create_dir_all(&directory)?;
        let output = Command::new("apt-cache")
            .args(["depends", "linux-image-cloud-amd64"])
            .output()?;
        let package = kernel_in(&String::from_utf8_lossy(&output.stdout))?;
        let mut download = Command::new("apt-get");
        download.args(["download", "-qq", "-o", "APT::Sandbox::User=root", &package]);
        run_shown(download.current_dir(&directory))?;
        for package in fs::read_dir(&directory)? {
            let package = package?.path();
            if package.extension().is_some_and(|end| end == "deb") {
                run_shown(Command::new("dpkg").arg("-x").arg(package).arg(&unpacked))?;
            }
        }
        Ok(unpacked)
    }

    /// Starts the unpacked emulator, so that a missing library is found now.
    fn emulator_version(&self) -> Result<String> {
        let output = Command::new(self.root().join(EMULATOR))
            .arg("--version")
            .env("LD_LIBRARY_PATH", self.libraries())
            .output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        match said.lines().next() {
            Some(line) if output.status.success() => Ok(line.to_owned()),
            _ => bail!(
                "the emulator does not start here: {}",
                String::from_utf8_lossy(&output.stderr)
            ),
        }
    }

    /// The entry of a directory of the unpacked packages whose name begins with `begin`.
    pub(super) fn find_file(&self, directory: &str, begin: &str) -> Result<PathBuf> {
        let directory = self.root().join(directory);
        let entries = fs::read_dir(&directory).with_context(|| format!("reading {}", directory.display()))?;
        let mut names = entries.flatten().map(|entry| entry.path());
        let found = names.find(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with(begin))
        });
        found.with_context(|| format!("nothing in {} begins with {begin:?}", directory.display()))
    }
}

/// The package of a kernel in the list of what a package needs.
fn kernel_in(listed: &str) -> Result<String> {
    let mut depends = listed
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "));
    let found = depends.find(|package| package.starts_with("linux-image-"));
    Ok(found.context("no kernel is among the packages")?.to_owned())
}

/// The mirror from which this machine gets Debian's packages.
fn mirror() -> Result<String> {
    let format = "$(ORIGIN)|$(CODENAME)|$(REPO_URI)";
    let output = Command::new("apt-get")
        .args(["indextargets", "--format", format, "Created-By: Packages"])
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mirror = text
        .lines()
        .find_map(|line| line.strip_prefix("Debian|bookworm|"));
    Ok(mirror
        .context("this machine does not use Debian 12's packages")?
        .to_owned())
}

const SUITES: [&str; 2] = ["bookworm", "bookworm-backports"];
const PACKAGES: &str =
    "qemu-system-x86 qemu-system-data seabios busybox-static dmsetup nbd-client e2fsprogs xfsprogs dbench";
/// Packages whose libraries this machine may lack.
const WITH_LIBRARIES: &str = "qemu-system-x86 dmsetup nbd-client e2fsprogs xfsprogs dbench";
/// Debian 12's own emulator crashes in one of five boots of the newer kernel.
const PREFERENCES: &str = "\
Package: qemu-* seabios linux-image-*
Pin: release n=bookworm-backports
Pin-Priority: 990
";
pub(super) const EMULATOR: &str = "usr/bin/qemu-system-x86_64";
