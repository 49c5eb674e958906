//! Tests that need another kernel's devices, in an emulated guest with Debian's kernel.
//!
//! The packages are unpacked below the build directory ([`packages`]); the guest's file system is
//! made of them and of programs without shared libraries ([`initrd`]); the guest is booted
//! ([`machine`]).

mod clones;
mod dbench;
mod hosts;
mod initrd;
mod libvirt;
mod load;
mod machine;
mod nbd_client;
mod nfs;
mod packages;
mod ublk;
mod virtual_disk;
mod weights;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use self::initrd::Initrd;
use self::machine::Machine;
use self::packages::Place;
use crate::mutant;
use crate::place::{STATIC_TRIPLE, cargo_static};
use crate::steps::{Steps, run_shown};
use blkmq_testkit::tools::find;

/// Runs one of the [`TESTS`], or all of them.
///
/// If a test cannot be built, or fails in the guest, or there is none with this name. The tests are
/// skipped if a guest's requirement is not available.
pub(crate) fn run(steps: &mut Steps, only: Option<&str>) -> Result<()> {
    ensure!(
        only.is_none_or(|only| TESTS.contains(&only)),
        "there is no such test in a guest; there are {}",
        TESTS.join(", ")
    );
    let Some(place) = find_place(steps)? else {
        return Ok(());
    };
    let is_wanted = |name: &str| only.is_none_or(|only| only == name);
    if is_wanted(POLLED) {
        run_polled(steps, &place)?;
    }
    for kind in [hosts::HOSTS, hosts::DM_CRYPT] {
        if is_wanted(kind.name) {
            hosts::run(steps, &place, &kind)?;
        }
    }
    if is_wanted(libvirt::TEST) {
        libvirt::run(steps, &place)?;
    }
    if is_wanted(VIRTUAL_DISK) {
        let program = steps.command_under_test()?;
        run_virtual_disk(steps, &place, &program, virtual_disk::Length::FULL)?;
    }
    if is_wanted(clones::TEST) {
        let program = steps.command_under_test()?;
        steps.time("guests on disks over one image", || clones::run(&place, &program))?;
    }
    if is_wanted(WEIGHTS) {
        run_weights(steps, &place)?;
    }
    if is_wanted(DBENCH) {
        let program = built_program(steps, &place, "blkmq-lab")?;
        steps.time("dbench on ublk in a guest", || dbench::run(&place, &program))?;
    }
    if is_wanted(NBD_CLIENT) {
        let program = built_command(steps, &place)?;
        steps.time("the kernel's NBD client in a guest", || {
            nbd_client::run(&place, &program)
        })?;
    }
    if is_wanted(nfs::TEST) {
        let program = steps.command_under_test()?;
        steps.time("locks on NFS in a guest", || nfs::run(&place, &program))?;
    }
    // Two tests do the same; without a name, the longer one runs.
    let devices = UBLK_TESTS
        .iter()
        .filter(|(name, _)| only.map_or(*name != UBLK, |only| only == *name));
    for (name, test) in devices {
        let program = built_command(steps, &place)?;
        steps.time(&format!("{name} in a guest"), || {
            ublk::run(&place, &program, *test)
        })?;
    }
    let proofs = PROOFS.iter().filter(|proof| is_wanted(proof.name));
    for (number, proof) in proofs.enumerate() {
        if number == 0 {
            steps.time("static build of the command and the proof", || {
                build(&place, None)
            })?;
        }
        let program = built(&place, None).join("blkmq");
        let verdict = steps.time(&format!("{} in a guest", proof.name), || {
            prove(&place, proof, &program)
        })?;
        match verdict {
            Verdict::Right => {}
            Verdict::Lost => bail!("data was lost; again: cargo xtask guest {}", proof.name),
            Verdict::Broken => bail!(
                "the proof could not be made; again: cargo xtask guest {}",
                proof.name
            ),
        }
    }
    steps.print_summary();
    Ok(())
}

/// What continuous integration runs: a guest whose disk is one of ours, with each kind of ring.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_short(steps: &mut Steps) -> Result<()> {
    let Some(place) = find_place(steps)? else {
        return Ok(());
    };
    let program = steps.command_under_test()?;
    run_virtual_disk(steps, &place, &program, virtual_disk::Length::SHORT)
}

/// Runs the proofs on builds that lose data, each of which must be caught.
///
/// # Errors
/// If a mutant is not caught, or cannot be built, or there is none of that name for a proof of that
/// name.
pub(crate) fn run_mutants(steps: &mut Steps, only: Option<&str>, mutant: Option<&str>) -> Result<()> {
    let is_wanted = |word: Option<&str>, name: &str| word.is_none_or(|word| word == name);
    let all = PROOFS
        .iter()
        .flat_map(|proof| proof.mutants.iter().map(move |mutant| (proof, *mutant)));
    let wanted: Vec<_> = all
        .filter(|(proof, name)| is_wanted(only, proof.name) && is_wanted(mutant, name))
        .collect();
    ensure!(
        !wanted.is_empty(),
        "no such mutant is tried; {}",
        PROOFS
            .map(|proof| format!("{} tries {}", proof.name, proof.mutants.join(", ")))
            .join("; ")
    );
    let Some(place) = find_place(steps)? else {
        return Ok(());
    };
    steps.time("static build of the proof", || build(&place, None))?;
    for (proof, mutant) in wanted {
        steps.time(&format!("build of mutant {mutant}"), || {
            build(&place, Some(mutant))
        })?;
        let program = built(&place, Some(mutant)).join("blkmq");
        let name = format!("mutant {mutant}, {} in a guest", proof.name);
        match steps.time(&name, || prove(&place, proof, &program))? {
            Verdict::Lost => println!("    mutant {mutant}: caught"),
            Verdict::Right => bail!("mutant {mutant} got through"),
            Verdict::Broken => bail!("mutant {mutant}: the proof could not be made"),
        }
    }
    steps.print_summary();
    Ok(())
}

/// Boots a guest whose first process runs `program`, one of the tests that `name` has, and shows its output. Cargo
/// calls this to run a test.
///
/// # Errors
/// If there is no guest, or it does not report that the program succeeded.
pub(crate) fn boot(name: &str, program: &Path, args: &[String]) -> Result<()> {
    let place = Place::find()?;
    match name {
        name if name == hosts::HOSTS.name => hosts::boot(&place, &hosts::HOSTS, program, args),
        name if name == hosts::DM_CRYPT.name => hosts::boot(&place, &hosts::DM_CRYPT, program, args),
        _ => boot_polled(&place, program, args),
    }
}

fn boot_polled(place: &Place, program: &Path, args: &[String]) -> Result<()> {
    let mut initrd = Initrd::new(place)?;
    initrd.add_program(program, "tests")?;
    initrd.add_module("null_blk", POLLED_DISKS)?;
    let filesystem = fs::File::create(initrd.path("ext4.img"))?;
    filesystem.set_len(FILESYSTEM_BYTES)?;
    let maker = find("mkfs.ext4").context("mkfs.ext4 is not installed; run: cargo xtask setup")?;
    run_shown(Command::new(maker).arg("-q").arg(initrd.path("ext4.img")))?;
    let script = POLLED_SCRIPT
        .replace("ARGS", &args.join(" "))
        .replace("SUCCESS", SUCCESS);
    let said = boot_plain(place, &initrd.pack(&script)?, POLLED_TIME_MAX)?;
    ensure!(is_said(&said, SUCCESS), "the guest did not say `{SUCCESS}`");
    Ok(())
}

/// Loads the guest's disk: `DEPTH SECONDS`.
///
/// # Errors
/// If the words are not these two numbers, or a read fails.
pub(crate) fn load(words: &[String]) -> Result<()> {
    let [depth, seconds] = words else {
        bail!("{LOAD} wants DEPTH and SECONDS");
    };
    load::run(depth.parse()?, seconds.parse()?)
}

/// A proof of `blkmq-guest` that looks at a daemon in a guest.
struct Proof {
    name: &'static str,
    tools: &'static [&'static str],
    modules: &'static [&'static str],
    /// The mutants that this proof must detect, by the names of `cargo xtask crashes --mutants`.
    mutants: &'static [&'static str],
}

/// The result of a proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Right,
    Lost,
    Broken,
}

/// The packages; if they are not available, none, and the reason is recorded as a skip.
fn find_place(steps: &mut Steps) -> Result<Option<Place>> {
    let place = Place::find()?;
    if !place.is_complete()
        && let Err(error) = steps.time("packages of the guest", || place.fill())
    {
        steps.skip("tests in a guest", &format!("{error:#}"));
        return Ok(None);
    }
    Ok(Some(place))
}

fn run_virtual_disk(
    steps: &mut Steps,
    place: &Place,
    program: &Path,
    length: virtual_disk::Length,
) -> Result<()> {
    for rings in virtual_disk::RINGS {
        steps.time(&format!("a disk of a virtual machine, {rings}"), || {
            virtual_disk::run(place, program, rings, length)
        })?;
    }
    Ok(())
}

fn run_weights(steps: &mut Steps, place: &Place) -> Result<()> {
    let program = steps.command_under_test()?;
    steps.time("static build of the guests' load", || {
        run_shown(&mut build_command(place, None, "build --quiet -p xtask"))
    })?;
    let load = built(place, None).join("xtask");
    for visit in 1..=VISITS {
        steps.time(
            &format!("two guests by weight, visit {visit} of {VISITS}"),
            || weights::visit(place, &program, &load),
        )?;
    }
    Ok(())
}

fn run_polled(steps: &mut Steps, place: &Place) -> Result<()> {
    let mut tests = build_command(place, None, "test -p blkmq-drivers --lib --test files");
    tests.args(["--", "--nocapture", "--test-threads=1", "polled"]);
    tests.env(
        RUNNER,
        format!("{} {BOOT} {POLLED}", std::env::current_exe()?.display()),
    );
    steps.run("polled devices in a guest", &mut tests)
}

fn prove(place: &Place, proof: &Proof, program: &Path) -> Result<Verdict> {
    let mut initrd = Initrd::new(place)?;
    initrd.add_program(program, "blkmq")?;
    initrd.add_program(&built(place, None).join("blkmq-guest"), "blkmq-guest")?;
    for tool in proof.tools {
        initrd.add_tool(tool)?;
    }
    initrd.add_module("null_blk", "nr_devices=0")?;
    for module in proof.modules {
        initrd.add_module(module, "")?;
    }
    let script = PROOF_SCRIPT
        .replace("PROOF", proof.name)
        .replace("SUCCESS", SUCCESS)
        .replace("LOSS", LOSS);
    let said = boot_plain(place, &initrd.pack(&script)?, PROOF_TIME_MAX)?;
    Ok(match said {
        said if is_said(&said, SUCCESS) => Verdict::Right,
        said if is_said(&said, LOSS) => Verdict::Lost,
        _ => Verdict::Broken,
    })
}

/// Boots a guest that needs no other process.
fn boot_plain(place: &Place, initrd: &Path, limit: Duration) -> Result<String> {
    machine::boot(Machine {
        place,
        initrd,
        limit,
        words: &[],
        heard: &mut |_| {},
    })
}

fn is_said(said: &str, line: &str) -> bool {
    said.lines().any(|said| said == line)
}

/// Builds the command, with a mutant or without, and, without a mutant, the proofs.
fn build(place: &Place, mutant: Option<&str>) -> Result<()> {
    let packages = match mutant {
        None => "build --quiet -p blkmq -p blkmq-torture",
        Some(_) => "build --quiet -p blkmq",
    };
    let mut command = build_command(place, mutant, packages);
    if mutant.is_some() {
        command.current_dir(mutant::source(mutant)?);
    }
    run_shown(&mut command)
}

/// The command, built for a guest.
fn built_command(steps: &mut Steps, place: &Place) -> Result<PathBuf> {
    built_program(steps, place, "blkmq")
}

/// The program of the crate `name`, which has the same name, built for a guest.
fn built_program(steps: &mut Steps, place: &Place, name: &str) -> Result<PathBuf> {
    steps.time(&format!("static build of {name}"), || {
        run_shown(&mut build_command(
            place,
            None,
            &format!("build --quiet -p {name}"),
        ))
    })?;
    Ok(built(place, None).join(name))
}

/// A cargo command that builds programs without shared libraries, for a guest.
fn build_command(place: &Place, mutant: Option<&str>, words: &str) -> Command {
    let mut command = cargo_static(words);
    command
        .arg("--release")
        // These reduce the build time; the run time is dominated by the emulator.
        .envs([
            ("CARGO_PROFILE_RELEASE_LTO", "off"),
            ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16"),
            ("CARGO_PROFILE_RELEASE_DEBUG", "0"),
        ])
        .env("CARGO_TARGET_DIR", build_dir(place, mutant));
    if mutant.is_some() {
        command.env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1");
    }
    command
}

/// Mutants are built in a directory of their own, so that none is mistaken for the delivered build.
fn build_dir(place: &Place, mutant: Option<&str>) -> PathBuf {
    match mutant {
        None => place.file("build"),
        Some(_) => place.file("mutants"),
    }
}

fn built(place: &Place, mutant: Option<&str>) -> PathBuf {
    build_dir(place, mutant).join(STATIC_TRIPLE).join("release")
}

/// The chore with which cargo calls [`boot`].
pub(crate) const BOOT: &str = "guest-boot";
/// The chore that runs [`load()`] in a guest.
pub(crate) const LOAD: &str = "guest-load";
/// The tests that `cargo xtask guest NAME` runs.
const TESTS: [&str; 15] = [
    POLLED,
    hosts::HOSTS.name,
    hosts::DM_CRYPT.name,
    libvirt::TEST,
    VIRTUAL_DISK,
    clones::TEST,
    WEIGHTS,
    DBENCH,
    NBD_CLIENT,
    nfs::TEST,
    UBLK,
    UBLK_KILLS,
    UBLK_FAILURES,
    PROOFS[0].name,
    PROOFS[1].name,
];
const POLLED: &str = "polled";
const VIRTUAL_DISK: &str = "vhost-user";
const WEIGHTS: &str = "weights";
const VISITS: u32 = 3;
const DBENCH: &str = "dbench";
const NBD_CLIENT: &str = "nbd-client";
const UBLK: &str = "ublk";
const UBLK_KILLS: &str = "ublk-kills";
const UBLK_FAILURES: &str = "ublk-failures";
const UBLK_TESTS: [(&str, ublk::Test); 3] = [
    (UBLK, ublk::Test::Devices { kills: 3 }),
    (UBLK_KILLS, ublk::Test::Devices { kills: 20 }),
    (UBLK_FAILURES, ublk::Test::Failures),
];
const PROOFS: [Proof; 2] = [
    Proof {
        name: "log-writes",
        tools: &TOOLS,
        modules: &["nbd", "dm-mod", "dm-log-writes", "xfs"],
        mutants: &["fsync", "dsync", "preflush", "postflush"],
    },
    Proof {
        name: "flakey",
        tools: &TOOLS,
        modules: &["dm-mod", "dm-flakey", "xfs"],
        mutants: &["fsync", "dsync", "preflush", "postflush", "latch"],
    },
];
const TOOLS: [&str; 6] = [
    "dmsetup",
    "nbd-client",
    "mkfs.ext4",
    "e2fsck",
    "mkfs.xfs",
    "xfs_repair",
];
const RUNNER: &str = "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER";
const POLLED_TIME_MAX: Duration = Duration::from_secs(180);
const PROOF_TIME_MAX: Duration = Duration::from_secs(200);
/// The guest's last line if the program succeeded.
const SUCCESS: &str = "the tests in the guest have passed";
/// The guest's last line if the program found lost data.
const LOSS: &str = "the tests in the guest have found lost data";
/// The size of the filesystem at the start of the second null disk.
const FILESYSTEM_BYTES: u64 = 16 << 20;
/// Null disks that take 100 µs and keep what is written, with two queues that interrupt and two
/// that are polled. The tests write to the first disk itself, and to a file on the second.
const POLLED_DISKS: &str = "nr_devices=2 queue_mode=2 submit_queues=2 poll_queues=2 memory_backed=1 irqmode=2 completion_nsec=100000 gb=1 bs=512";
const POLLED_SCRIPT: &str = "\
busybox echo \"Linux $(busybox uname -r), nullb0: io_poll=$(busybox cat /sys/block/nullb0/queue/io_poll)\"
busybox dd if=/ext4.img of=/dev/nullb1 bs=1M 2>/dev/null
busybox mount -t ext4 /dev/nullb1 /mnt
busybox echo 'on the device' && BLKMQ_POLLED_DEVICE=/dev/nullb0 tests ARGS &&
busybox echo 'in a file on ext4' && TMPDIR=/mnt tests ARGS && busybox echo SUCCESS
";
/// The device mapper's own tools make its nodes, since the guest has nothing else that does.
const PROOF_SCRIPT: &str = "\
for applet in mount umount; do busybox ln -s busybox /bin/$applet; done
busybox mount -t configfs configfs /sys/kernel/config
export DM_DISABLE_UDEV=1
blkmq-guest PROOF --program /bin/blkmq
case $? in
0) busybox echo SUCCESS ;;
3) busybox echo LOSS ;;
esac
";
