//! The servers that are compared, plain and encrypted, on one image.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use blkmq_testkit::Scratch;

use crate::server::{Running, daemon};

/// What serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// This program, the image as it is.
    Plain,
    /// This program, what is encrypted in it.
    Luks,
    /// qemu-storage-daemon, what is encrypted in it.
    Qemu,
}

/// An image in LUKS1 full of noise, and its key. All sides have this one file, since
/// a drive is not equally fast everywhere.
pub(super) struct Image {
    path: PathBuf,
    /// The image up to its payload: writes to the plain disk destroy it.
    header: Vec<u8>,
    files: Scratch,
}

/// What the disks lie on.
pub(super) enum Drive<'a> {
    /// A file in memory.
    Memory(&'a Image),
    /// A file on a drive.
    File(&'a Image),
}

/// A running server.
pub(super) struct Server {
    running: Running,
    pub(super) uri: String,
}

impl Side {
    pub(super) const ALL: [Self; 3] = [Self::Plain, Self::Luks, Self::Qemu];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Luks => "luks",
            Self::Qemu => "qemu-luks",
        }
    }
}

impl Image {
    /// Makes an image in a directory.
    ///
    /// # Errors
    /// There is no `cryptsetup`, it fails, or the file cannot be written.
    pub(super) fn make(dir: &Path) -> Result<Self> {
        let mut image = Self {
            path: dir.join(format!("blkmq-bench-luks-{}", std::process::id())),
            header: vec![0; HEADER_BYTES],
            files: Scratch::new(),
        };
        let shown = format!("image {}", image.path.display());
        let mut noise = File::open("/dev/urandom")?.take(IMAGE_BYTES);
        let mut file = File::create(&image.path).context(shown.clone())?;
        std::io::copy(&mut noise, &mut file).context(shown.clone())?;
        fs::write(image.files.path("key"), "a key of the bench")?;
        image.format()?;
        File::open(&image.path)
            .and_then(|mut file| file.read_exact(&mut image.header))
            .context(shown)?;
        Ok(image)
    }

    /// Makes it one in LUKS1 again, on the drive.
    fn restore_header(&self) -> Result<()> {
        let file = File::options().write(true).open(&self.path);
        file.and_then(|file| file.write_all_at(&self.header, 0).and_then(|()| file.sync_all()))
            .with_context(|| format!("image {}", self.path.display()))
    }

    fn format(&self) -> Result<()> {
        let options = "luksFormat --batch-mode --type luks1 --cipher aes-xts-plain64 --key-size 512";
        let mut command = Command::new("cryptsetup");
        command.args(options.split(' '));
        command.args([
            "--pbkdf-force-iterations",
            "1000",
            "--key-file",
            &self.word("key"),
        ]);
        command.arg(&self.path).stdin(Stdio::null());
        let output = command
            .output()
            .context("cryptsetup cannot be started: apt-get install cryptsetup-bin")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "cryptsetup luksFormat: {said}");
        Ok(())
    }

    fn word(&self, file: &str) -> String {
        self.files.path(file).display().to_string()
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

impl Drive<'_> {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Memory(_) => "tmpfs",
            Self::File(_) => "drive",
        }
    }

    fn image(&self) -> &Image {
        let (Self::Memory(image) | Self::File(image)) = self;
        image
    }
}

impl Server {
    /// Starts a server.
    ///
    /// # Errors
    /// It does not serve.
    pub(super) fn start(side: Side, drive: &Drive<'_>) -> Result<Self> {
        let dir = Scratch::new();
        let socket = dir.path("s");
        if side != Side::Plain {
            drive.image().restore_header()?;
        }
        let command = match side {
            Side::Qemu => qemu(drive, &socket),
            _ => ours(side, drive, &socket)?,
        };
        let running = Running::start(command, dir, socket)?;
        let uri = format!("nbd+unix:///bench?socket={}", running.place().display());
        Ok(Self { running, uri })
    }

    pub(super) fn pid(&self) -> u32 {
        self.running.pid()
    }
}

fn ours(side: Side, drive: &Drive<'_>, socket: &Path) -> Result<Command> {
    let file = format!("file={}", drive.image().path.display());
    let mut command = Command::new(daemon()?);
    command.args([
        "serve",
        "--control",
        "none",
        "--nbd",
        &format!("unix:{}", socket.display()),
    ]);
    match side {
        Side::Plain => command.args(["--disk", &format!("name=bench,{file}")]),
        _ => {
            let key = drive.image().word("key");
            command.args(["--disk", &format!("name=bench,luks=below,key={key}")]);
            command.args(["--disk", &format!("name=below,{file}")])
        }
    };
    Ok(command)
}

fn qemu(drive: &Drive<'_>, socket: &Path) -> Command {
    let image = drive.image();
    let direct = match drive {
        Drive::File(_) => "on",
        _ => "off",
    };
    let mut command = Command::new("qemu-storage-daemon");
    for (option, words) in [
        ("--object", format!("secret,id=key,file={}", image.word("key"))),
        (
            "--blockdev",
            format!(
                "driver=file,node-name=file,filename={},aio=io_uring,cache.direct={direct}",
                image.path.display()
            ),
        ),
        (
            "--blockdev",
            "driver=luks,node-name=luks,file=file,key-secret=key".to_owned(),
        ),
        (
            "--nbd-server",
            format!("addr.type=unix,addr.path={}", socket.display()),
        ),
        (
            "--export",
            "type=nbd,id=export,node-name=luks,name=bench,writable=on".to_owned(),
        ),
    ] {
        command.args([option, &words]);
    }
    command
}

/// Bytes of an image.
const IMAGE_BYTES: u64 = 256 << 20;
/// Bytes before the payload, as `cryptsetup` places it.
const HEADER_BYTES: usize = 2 << 20;
