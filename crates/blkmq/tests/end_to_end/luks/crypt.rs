//! What `cryptsetup` does to the images of a test: it formats, encrypts and decrypts files, without devices.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::common::Scratch;
use crate::common::daemon::{serve_command, wait_within};
use crate::common::tools::{installed, run};

/// A passphrase in a file, and what is encrypted with it.
pub(super) struct Crypt<'a> {
    scratch: &'a Scratch,
}

/// The passphrase. Its last byte counts.
pub(super) const KEY: &str = "a passphrase??? of sixty bytes, which no other memory holds\n";

/// Whether the tools are installed; if not, the test is skipped.
pub(super) fn has_tools(names: &[&str]) -> bool {
    installed(names)
}

impl<'a> Crypt<'a> {
    pub(super) fn new(scratch: &'a Scratch) -> Self {
        std::fs::write(scratch.path("key"), KEY).expect("the key's file");
        Self { scratch }
    }

    pub(super) fn key_file(&self) -> String {
        self.scratch.word("key")
    }

    /// Formats an image of `bytes`. Returns its path.
    pub(super) fn format(&self, name: &str, bytes: u64, options: &str) -> String {
        let image = self.scratch.image(name, bytes);
        self.run(&format!("luksFormat {} {options}", cheap(options)), &image);
        image
    }

    /// The same with key slots that take as long as these options say.
    pub(super) fn format_as(&self, name: &str, bytes: u64, options: &str) -> String {
        let image = self.scratch.image(name, bytes);
        self.run(&format!("luksFormat {options}"), &image);
        image
    }

    /// Makes a detached header for a disk of any size. Returns its path.
    pub(super) fn detached(&self) -> String {
        self.detached_as("header", "--type luks2 --pbkdf pbkdf2 --sector-size 4096")
    }

    /// The same in a file of this name, with these options.
    pub(super) fn detached_as(&self, name: &str, options: &str) -> String {
        let header = self.scratch.word(name);
        let data = self.scratch.image("data", 1 << 20);
        self.run(
            &format!("luksFormat {} {options} --header {header}", cheap(options)),
            &data,
        );
        header
    }

    /// Has an image encrypted that begins with `plain` and has `bytes`. Returns its path.
    pub(super) fn encrypt(&self, name: &str, plain: &[u8], bytes: u64, sector: &str) -> String {
        let image = self.scratch.image(name, bytes + (32 << 20));
        let mut all = plain.to_vec();
        all.resize(bytes as usize + (32 << 20), 0);
        std::fs::write(&image, all).expect("the image");
        let options = format!(
            "reencrypt --encrypt --force-offline-reencrypt --reduce-device-size 32M --type luks2 --pbkdf pbkdf2 \
             --sector-size {sector}"
        );
        self.run(&format!("{options} {}", cheap(&options)), &image);
        image
    }

    /// Has a copy of an image decrypted. Returns its path.
    pub(super) fn decrypt(&self, image: &str) -> String {
        let copy = self.scratch.word("decrypted");
        std::fs::copy(image, &copy).expect("a copy");
        let header = self.scratch.word("decrypted-header");
        let _ = std::fs::remove_file(&header);
        self.run(
            &format!("reencrypt --decrypt --force-offline-reencrypt --header {header}"),
            &copy,
        );
        copy
    }

    /// The volume key of an image, as `cryptsetup` shows it.
    pub(super) fn volume_key(&self, image: &str) -> Vec<u8> {
        let file = self.scratch.word("volume-key");
        let _ = std::fs::remove_file(&file);
        self.run(
            &format!("luksDump --dump-volume-key --volume-key-file {file}"),
            image,
        );
        std::fs::read(file).expect("the volume key")
    }

    /// Damages both copies of a header.
    pub(super) fn break_header(&self, image: &str) {
        let mut bytes = std::fs::read(image).expect("the image");
        [5000, 16384 + 5000].iter().for_each(|at| bytes[*at] ^= 1);
        std::fs::write(image, bytes).expect("the image");
    }

    fn run(&self, options: &str, image: &str) {
        let key = self.key_file();
        let mut words: Vec<&str> = options.split_whitespace().collect();
        words.extend(["--batch-mode", "--key-file", &key, image]);
        run("cryptsetup", &words);
    }
}

/// Runs a daemon that must not start. Returns what it says.
pub(crate) fn refused(scratch: &Scratch, disks: &[String]) -> String {
    let nbd = format!("unix:{}", scratch.word("refused.sock"));
    let mut words = vec!["--nbd", &nbd];
    disks.iter().for_each(|disk| words.extend(["--disk", disk]));
    let mut command = serve_command(&words);
    let said = Path::new(&scratch.word("refused.log")).to_owned();
    let log = std::fs::File::create(&said).expect("a log");
    let mut child = command
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .expect("the command runs");
    let Some(status) = wait_within(&mut child, Duration::from_secs(30)) else {
        let _ = child.kill();
        panic!("{disks:?}: it serves");
    };
    assert!(!status.success(), "{disks:?}: it has served");
    std::fs::read_to_string(said).expect("the log")
}

/// Key slots that take no time.
fn cheap(options: &str) -> &'static str {
    match options.contains("argon2") {
        true => "--pbkdf-force-iterations 4 --pbkdf-memory 32 --pbkdf-parallel 1",
        false => "--pbkdf-force-iterations 1000",
    }
}
