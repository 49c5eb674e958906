//! Images in files of their own, made and changed by `cryptsetup`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use ring::digest;

/// An image, removed when it is dropped.
pub(crate) struct Image {
    dir: PathBuf,
    is_detached: bool,
}

pub(crate) const PASSPHRASE: &[u8] = b"correct horse\n";

/// Whether the program is there; if not, the test is skipped.
pub(crate) fn has_cryptsetup() -> bool {
    let is_there = Command::new("cryptsetup").arg("--version").output().is_ok();
    if !is_there {
        blkmq_testkit::skip("cryptsetup is not installed (apt-get install cryptsetup-bin)");
    }
    is_there
}

impl Image {
    /// Formats an image with cheap key slots.
    pub(crate) fn formatted(options: &str) -> Self {
        Self::try_formatted(options).unwrap_or_else(|| panic!("cryptsetup luksFormat {options}"))
    }

    /// The same; none if this `cryptsetup` cannot.
    pub(crate) fn try_formatted(options: &str) -> Option<Self> {
        let image = Self::empty();
        let done = image.run(&format!("luksFormat {} {options}", cheap(options)), &image.data());
        done.status.success().then_some(image)
    }

    /// Formats an image whose header is in another file.
    pub(crate) fn detached(options: &str) -> Self {
        let mut image = Self::empty();
        image.is_detached = true;
        let header = image.header();
        let options = format!(
            "luksFormat {} {options} --header {}",
            cheap(options),
            header.display()
        );
        let done = image.run(&options, &image.data());
        assert!(done.status.success(), "{done:?}");
        image
    }

    /// Has `cryptsetup` encrypt a file in place, without a device.
    pub(crate) fn encrypted(plain: &[u8], options: &str) -> Self {
        let image = Self::empty();
        let mut bytes = plain.to_vec();
        bytes.resize(plain.len() + (64 << 20), 0);
        image.write(&bytes);
        let options = format!(
            "reencrypt --encrypt --reduce-device-size 32M {} {options}",
            cheap(options)
        );
        let done = image.run(&options, &image.data());
        assert!(done.status.success(), "{done:?}");
        image
    }

    /// An image of zeroes.
    pub(crate) fn empty() -> Self {
        // Relaxed: a number for each, and nothing else.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("blkmq-luks-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let image = Self {
            dir,
            is_detached: false,
        };
        std::fs::write(image.key_file(), PASSPHRASE).unwrap();
        std::fs::File::create(image.data())
            .unwrap()
            .set_len(32 << 20)
            .unwrap();
        image
    }

    /// The file that has the data.
    pub(crate) fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    /// The file that has the header.
    pub(crate) fn header(&self) -> PathBuf {
        match self.is_detached {
            true => self.dir.join("header"),
            false => self.data(),
        }
    }

    fn key_file(&self) -> PathBuf {
        self.dir.join("key")
    }

    /// The volume key, as `cryptsetup` shows it.
    pub(crate) fn volume_key(&self) -> Vec<u8> {
        let file = self.dir.join("volume-key");
        let options = format!("luksDump --dump-volume-key --volume-key-file {}", file.display());
        let done = self.run(&options, &self.header());
        assert!(done.status.success(), "{done:?}");
        std::fs::read(file).unwrap()
    }

    pub(crate) fn uuid(&self) -> String {
        let done = self.run("luksUUID", &self.header());
        String::from_utf8(done.stdout).unwrap().trim().to_owned()
    }

    /// Adds a passphrase to a slot.
    pub(crate) fn add_key(&self, passphrase: &str, slot: u8) {
        let file = self.dir.join("another");
        std::fs::write(&file, passphrase).unwrap();
        let mut command = self.command(
            "luksAddKey --pbkdf-force-iterations 1000 --pbkdf pbkdf2",
            &self.header(),
        );
        command.args(["--key-slot", &slot.to_string()]).arg(&file);
        let done = command.output().unwrap();
        assert!(done.status.success(), "{done:?}");
    }

    pub(crate) fn remove_slot(&self, slot: u8) {
        let mut command = Command::new("cryptsetup");
        command.args(["luksKillSlot", "--batch-mode"]).arg(self.header());
        let done = command.arg(slot.to_string()).output().unwrap();
        assert!(done.status.success(), "{done:?}");
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        std::fs::read(self.header()).unwrap()
    }

    pub(crate) fn write(&self, bytes: &[u8]) {
        std::fs::write(self.header(), bytes).unwrap();
    }

    /// Changes one byte of the header.
    pub(crate) fn flip(&self, place: usize) {
        let mut bytes = self.bytes();
        bytes[place] ^= 0x20;
        self.write(&bytes);
    }

    /// Changes the JSON of both copies of a header of 16 KiB, and makes their checksums right.
    pub(crate) fn replace_json(&self, from: &str, to: &str) {
        self.change_json(&[0, 1], |json| json.replace(from, to));
    }

    /// The same, at the first place alone.
    pub(crate) fn replace_first_in_json(&self, from: &str, to: &str) {
        self.change_json(&[0, 1], |json| json.replacen(from, to, 1));
    }

    /// The same, in some of the copies.
    pub(crate) fn replace_json_of(&self, copies: &[usize], from: &str, to: &str) {
        self.change_json(copies, |json| json.replace(from, to));
    }

    fn change_json(&self, copies: &[usize], change: impl Fn(&str) -> String) {
        let mut bytes = self.bytes();
        for number in copies {
            let copy = &mut bytes[number * COPY_BYTES..(number + 1) * COPY_BYTES];
            let json = String::from_utf8(copy[4096..].to_vec()).unwrap();
            let json = json.trim_end_matches('\0');
            let changed = change(json);
            assert_ne!(changed, json);
            copy[4096..].fill(0);
            copy[4096..4096 + changed.len()].copy_from_slice(changed.as_bytes());
            copy[448..512].fill(0);
            let digest = digest::digest(&digest::SHA256, copy);
            copy[448..480].copy_from_slice(digest.as_ref());
        }
        self.write(&bytes);
    }

    fn run(&self, options: &str, file: &Path) -> Output {
        self.command(options, file).output().unwrap()
    }

    fn command(&self, options: &str, file: &Path) -> Command {
        let mut command = Command::new("cryptsetup");
        command.args(options.split_whitespace());
        command
            .args(["--batch-mode", "--key-file"])
            .arg(self.key_file())
            .arg(file);
        command
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// Parameters of key slots that take no time.
fn cheap(options: &str) -> &'static str {
    match options.contains("argon2") {
        true => "--pbkdf-force-iterations 4 --pbkdf-memory 32 --pbkdf-parallel 1",
        false => "--pbkdf-force-iterations 1000",
    }
}

const COPY_BYTES: usize = 16 << 10;
static NEXT: AtomicU32 = AtomicU32::new(0);
