//! Decides how tests that need another kernel's devices are run: in an emulated guest with Debian's kernel and null_blk with poll queues.
//!
//! Nothing is installed. The packages are those of Debian 12 and its backports, from the mirror that this machine uses, unpacked below the
//! build directory. Cargo builds the tests without shared libraries, and calls this program again to run them ([`boot`]).

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::place::{cargo, find_tool, target_dir};
use crate::steps::{Steps, run_shown};

/// # Errors
/// If the tests cannot be built, or fail in the guest. What a guest needs and is not to be had is a reason to skip.
pub(crate) fn run(steps: &mut Steps) -> Result<()> {
    let place = Place::find()?;
    if !place.is_complete()
        && let Err(error) = steps.time("packages of the guest", || place.fill())
    {
        steps.skip("tests in a guest", &format!("{error:#}"));
        return Ok(());
    }
    let mut tests = cargo("test --release -p blkmq-host --lib --test files");
    tests
        .args([
            "--target",
            TRIPLE,
            "--",
            "--nocapture",
            "--test-threads=1",
            "polled",
        ])
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        // Quick to build rather than quick to run: the emulator is what takes its time.
        .envs([
            ("CARGO_PROFILE_RELEASE_LTO", "off"),
            ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16"),
        ])
        .env("CARGO_TARGET_DIR", place.0.join("build"))
        .env(RUNNER, format!("{} {BOOT}", std::env::current_exe()?.display()));
    steps.run("tests in a guest", &mut tests)?;
    steps.print_summary();
    Ok(())
}

/// Boots a guest whose first process runs `program`, and shows what it says. Cargo calls this in place of the test.
///
/// # Errors
/// If there is no guest, or it says anything but that the program succeeded.
pub(crate) fn boot(program: &Path, args: &[String]) -> Result<()> {
    let place = Place::find()?;
    let initrd = place.pack(program, args)?;
    let kernel = place.find_file("boot", "vmlinuz-")?;
    // Nobody waits for ever for a guest that hangs.
    let mut emulator = Command::new("timeout");
    emulator.arg(BOOT_SECONDS).arg(place.root().join(EMULATOR));
    for firmware in ["qemu", "seabios"] {
        emulator
            .arg("-L")
            .arg(place.root().join("usr/share").join(firmware));
    }
    emulator
        .args(MACHINE.split_whitespace())
        .arg("-kernel")
        .arg(kernel)
        .arg("-initrd")
        .arg(initrd)
        .args(["-append", "console=ttyS0 quiet panic=-1"])
        .env("LD_LIBRARY_PATH", place.root().join("usr/lib/x86_64-linux-gnu"))
        .stdin(Stdio::null());
    let output = emulator.stderr(Stdio::inherit()).output();
    let output = output.context("starting the emulator")?;
    let said = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    print!("{said}");
    ensure!(
        said.lines().any(|line| line == SUCCESS),
        "the guest did not say `{SUCCESS}` within {BOOT_SECONDS} s ({})",
        output.status
    );
    Ok(())
}

/// Where packages, what is in them, and the guest's files lie.
struct Place(PathBuf);

impl Place {
    fn find() -> Result<Self> {
        Ok(Self(target_dir()?.join("guest")))
    }

    fn root(&self) -> PathBuf {
        self.0.join("root")
    }

    fn is_complete(&self) -> bool {
        self.0.join("complete").is_file()
    }

    /// Downloads and unpacks what a guest needs.
    fn fill(&self) -> Result<()> {
        ensure!(
            std::env::consts::ARCH == "x86_64",
            "the guest is one for x86_64 machines"
        );
        for tool in ["apt-get", "apt-cache", "dpkg", "timeout", "xz", "mkfs.ext4"] {
            ensure!(find_tool(tool).is_some(), "there is no {tool} here");
        }
        for directory in ["lists/partial", "debs/partial", "cache", "root"] {
            fs::create_dir_all(self.0.join(directory))?;
        }
        let mirror = mirror()?;
        let sources = SUITES.map(|suite| format!("deb {mirror} {suite} main\n"));
        fs::write(self.0.join("sources.list"), sources.concat())?;
        fs::write(self.0.join("preferences"), PREFERENCES)?;
        run_shown(&mut self.apt("apt-get", "update -qq"))?;
        // The libraries that are missing here, and then what must be there even if this machine has it installed.
        let libraries = "install -qq -y --download-only --no-install-recommends qemu-system-x86";
        run_shown(&mut self.apt("apt-get", libraries))?;
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
        Ok(fs::write(self.0.join("complete"), version)?)
    }

    /// One of apt's programs, with lists, archives and sources of its own: nothing of the machine's is changed.
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
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut depends = text
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Depends: "));
        let found = depends.find(|package| package.starts_with("linux-image-"));
        Ok(found.context("no kernel is among the packages")?.to_owned())
    }

    /// Starts what was unpacked, so that a library that is missing shows now.
    fn emulator_version(&self) -> Result<String> {
        let output = Command::new(self.root().join(EMULATOR))
            .arg("--version")
            .env("LD_LIBRARY_PATH", self.root().join("usr/lib/x86_64-linux-gnu"))
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

    /// Makes the guest's file system: a shell, the modules, the program, and what to do with them.
    fn pack(&self, program: &Path, args: &[String]) -> Result<PathBuf> {
        let tree = self.0.join("initrd");
        for directory in ["bin", "dev", "mnt", "proc", "sys", "tmp"] {
            fs::create_dir_all(tree.join(directory))?;
        }
        fs::copy(self.root().join("bin/busybox"), tree.join("bin/busybox"))?;
        fs::copy(program, tree.join("bin/tests"))
            .with_context(|| format!("copying {}", program.display()))?;
        let modules = self.find_file("lib/modules", "")?.join("kernel");
        for module in ["fs/configfs/configfs", "drivers/block/null_blk/null_blk"] {
            let packed = modules.join(format!("{module}.ko.xz"));
            let unpacked = Command::new("xz").arg("-dc").arg(&packed).output()?;
            ensure!(unpacked.status.success(), "xz -dc {}", packed.display());
            let name = packed.file_stem().context("a module has a name")?;
            fs::write(tree.join(name), unpacked.stdout)?;
        }
        let filesystem = fs::File::create(tree.join("ext4.img"))?;
        filesystem.set_len(FILESYSTEM_BYTES)?;
        let maker = find_tool("mkfs.ext4").context("mkfs.ext4 is not installed; run: cargo xtask setup")?;
        run_shown(Command::new(maker).arg("-q").arg(tree.join("ext4.img")))?;
        let script = INIT.replace("ARGS", &args.join(" ")).replace("SUCCESS", SUCCESS);
        fs::write(tree.join("init"), script)?;
        fs::set_permissions(tree.join("init"), fs::Permissions::from_mode(0o755))?;
        let image = self.0.join("initrd.img");
        let archive = "find . | bin/busybox cpio -o -H newc 2>/dev/null";
        let archive = Command::new("sh")
            .args(["-c", archive])
            .current_dir(&tree)
            .output()?;
        ensure!(archive.status.success(), "cpio: {}", archive.status);
        fs::write(&image, archive.stdout)?;
        Ok(image)
    }

    /// The entry of a directory of the unpacked packages whose name begins so.
    fn find_file(&self, directory: &str, begin: &str) -> Result<PathBuf> {
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

/// Where this machine gets Debian's packages from.
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

/// The chore under which cargo calls [`boot`].
pub(crate) const BOOT: &str = "guest-boot";
const TRIPLE: &str = "x86_64-unknown-linux-gnu";
const RUNNER: &str = "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER";
const SUITES: [&str; 2] = ["bookworm", "bookworm-backports"];
const PACKAGES: &str = "qemu-system-x86 qemu-system-data seabios busybox-static";
/// Debian 12's own emulator crashes one boot in five of the newer kernel.
const PREFERENCES: &str = "\
Package: qemu-* seabios linux-image-*
Pin: release n=bookworm-backports
Pin-Priority: 990
";
const EMULATOR: &str = "usr/bin/qemu-system-x86_64";
const MACHINE: &str = "-accel tcg,thread=multi -cpu max -smp 2 -m 512 -machine q35 -nodefaults -no-reboot -display none -serial stdio";
const BOOT_SECONDS: &str = "180";
/// What the guest's last line is if the program succeeded.
const SUCCESS: &str = "the tests in the guest have passed";
/// What the second null disk begins with.
const FILESYSTEM_BYTES: u64 = 16 << 20;
/// Null disks that take 100 µs and keep what is written, with two queues that interrupt and two that are polled. The tests write to the
/// first one itself, and to a file on the second.
const INIT: &str = "\
#!/bin/busybox sh
export PATH=/bin
busybox mount -t proc proc /proc
busybox mount -t sysfs sysfs /sys
busybox mount -t devtmpfs devtmpfs /dev
busybox mount -t tmpfs tmpfs /tmp
busybox insmod /configfs.ko
busybox insmod /null_blk.ko nr_devices=2 queue_mode=2 submit_queues=2 poll_queues=2 memory_backed=1 irqmode=2 completion_nsec=100000 gb=1 bs=512
busybox echo \"Linux $(busybox uname -r), nullb0: io_poll=$(busybox cat /sys/block/nullb0/queue/io_poll)\"
busybox dd if=/ext4.img of=/dev/nullb1 bs=1M 2>/dev/null
busybox mount -t ext4 /dev/nullb1 /mnt
busybox echo 'on the device' && BLKMQ_POLLED_DEVICE=/dev/nullb0 tests ARGS &&
busybox echo 'in a file on ext4' && TMPDIR=/mnt tests ARGS && busybox echo SUCCESS
busybox poweroff -f
";
