//! The drive of the demo: a model, a file for each disk, or one file with a part for each. Files are full of
//! noise, since holes would be read without the drive, and are removed afterwards. Nobody else's file is
//! overwritten.

use std::fs::{self, DirBuilder, File};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail};

use super::client::{Job, noise};

/// The kind of drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Medium {
    /// A null drive with the latency of flash.
    Model,
    /// A file for each disk, in this directory.
    Dir(PathBuf),
    /// This file.
    File(PathBuf),
}

impl Medium {
    /// Returns a description of the drive for `disks` disks.
    pub(super) fn describe(&self, disks: usize) -> String {
        match self {
            Self::Dir(dir) => format!(
                "a file of {} MiB for each disk in {}",
                DISK_BYTES >> 20,
                dir.display()
            ),
            Self::File(file) => format!("{}, {} MiB", file.display(), file_bytes(disks) >> 20),
            Self::Model => format!(
                "a model of flash: {LATENCY_US} us for a request, {PARALLEL} at once, {BANDWIDTH_MIB} MiB/s in all"
            ),
        }
    }

    /// Its throughput for a job, in MB/s, if that is known.
    pub(super) fn capacity(&self, job: Job) -> Option<f64> {
        if *self != Self::Model {
            return None;
        }
        let by_servers = f64::from(PARALLEL * job.block_bytes()) / f64::from(LATENCY_US);
        Some(by_servers.min(f64::from(BANDWIDTH_MIB << 20) / 1e6))
    }
}

/// The drive; dropping it removes its files.
pub(super) struct Drive {
    names: Vec<String>,
    made: Made,
}

enum Made {
    Model,
    Dir(Scratch),
    File(ScratchFile),
}

impl Drive {
    /// Makes it, with room for the disks of these names.
    ///
    /// # Errors
    /// What cannot be made or filled, or a file that is not the demo's.
    pub(super) fn make(medium: &Medium, names: &[&str]) -> Result<Self> {
        let made = match medium {
            Medium::Model => Made::Model,
            Medium::Dir(dir) => Made::Dir(files(dir, names)?),
            Medium::File(path) => Made::File(ScratchFile::make(path, file_bytes(names.len()))?),
        };
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        Ok(Self { names, made })
    }

    /// The disks by name, with their keys, all on one queue.
    pub(super) fn disks(&self, queue: &str) -> Vec<(String, Vec<(String, String)>)> {
        let pair = |key: &str, value: String| (key.to_owned(), value);
        let on_queue = |mut pairs: Vec<(String, String)>| {
            pairs.push(pair("queue", queue.to_owned()));
            pairs
        };
        let file = |path: &Path| on_queue(vec![pair("file", path.to_string_lossy().into_owned())]);
        let mut disks = Vec::new();
        if let Made::File(whole) = &self.made {
            disks.push((WHOLE.to_owned(), file(&whole.0)));
        }
        for (place, name) in self.names.iter().enumerate() {
            let pairs = match &self.made {
                Made::Model => on_queue(model()),
                Made::Dir(dir) => file(&image(dir, name)),
                Made::File(_) => {
                    let start = HEAD_BYTES + place as u64 * DISK_BYTES;
                    vec![pair("linear", format!("{WHOLE}:{start}:{DISK_BYTES}"))]
                }
            };
            disks.push((name.clone(), pairs));
        }
        disks
    }
}

fn model() -> Vec<(String, String)> {
    let pairs = [
        ("null", "64G".into()),
        ("latency", format!("{LATENCY_US}us")),
        ("spread", "15us".into()),
        ("parallel", PARALLEL.to_string()),
        ("bandwidth", format!("{BANDWIDTH_MIB}M")),
    ];
    pairs
        .map(|(key, value): (&str, String)| (key.to_owned(), value))
        .into()
}

/// Makes a file for each disk.
fn files(dir: &Path, names: &[&str]) -> Result<Scratch> {
    let scratch = Scratch::make_in(dir)?;
    for name in names {
        let path = image(&scratch, name);
        let fill = || fill(&mut File::create_new(&path)?, DISK_BYTES);
        fill().with_context(|| {
            format!(
                "{}: cannot be filled with {} MiB; choose another --dir",
                path.display(),
                DISK_BYTES >> 20
            )
        })?;
    }
    Ok(scratch)
}

fn image(dir: &Scratch, disk: &str) -> PathBuf {
    dir.join(&format!("{disk}.raw"))
}

/// Appends `bytes` bytes of noise.
fn fill(file: &mut File, bytes: u64) -> std::io::Result<()> {
    let noise = noise(1 << 20);
    for _ in 0..bytes >> 20 {
        file.write_all(&noise)?;
    }
    file.sync_all()
}

/// The size of a file that has a head and a part for each disk.
fn file_bytes(disks: usize) -> u64 {
    HEAD_BYTES + disks as u64 * DISK_BYTES
}

/// A file that the demo made, now or in a run that was killed. It begins with a head that
/// identifies it and is on no disk.
struct ScratchFile(PathBuf);

impl ScratchFile {
    fn make(path: &Path, bytes: u64) -> Result<Self> {
        let mut file = match File::create_new(path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => ours(path)?,
            Err(error) => {
                return Err(error).with_context(|| {
                    format!(
                        "--file {}: cannot be made; name a path in a directory that can be written to",
                        path.display()
                    )
                });
            }
        };
        let made = Self(path.to_owned());
        let mut head = HEAD.as_bytes().to_vec();
        head.resize(HEAD_BYTES as usize, 0);
        let written = file
            .write_all(&head)
            .and_then(|()| fill(&mut file, bytes - HEAD_BYTES));
        written.with_context(|| {
            format!(
                "--file {}: cannot be filled with {} MiB; name a path on a filesystem that has them",
                path.display(),
                bytes >> 20
            )
        })?;
        Ok(made)
    }
}

impl Drop for ScratchFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Opens an existing file, if an earlier run of the demo left it.
fn ours(path: &Path) -> Result<File> {
    let is_file = fs::metadata(path).is_ok_and(|meta| meta.is_file());
    let refused = || {
        format!(
            "--file {}: refused: it is there already and was not made by the demo, which would overwrite it; name a path \
             where nothing is",
            path.display()
        )
    };
    if !is_file {
        bail!(refused());
    }
    let mut file = File::options()
        .read(true)
        .write(true)
        .open(path)
        .with_context(refused)?;
    let mut head = vec![0; HEAD.len()];
    if file.read_exact(&mut head).is_err() || head != HEAD.as_bytes() {
        bail!(refused());
    }
    file.seek(SeekFrom::Start(0))?;
    Ok(file)
}

/// A private directory, removed with its content.
pub(super) struct Scratch(PathBuf);

impl Scratch {
    /// Makes it.
    ///
    /// # Errors
    /// It cannot be made.
    pub(super) fn make_in(parent: &Path) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        // Relaxed: only the numbers must differ.
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("blkmq-demo-{}-{number}", std::process::id()));
        DirBuilder::new().mode(0o700).create(&path).with_context(|| {
            format!(
                "{}: cannot be made; is there a directory to write to?",
                path.display()
            )
        })?;
        Ok(Self(path))
    }

    /// The path of something in it.
    pub(super) fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The modelled drive: one that any host can keep busy over NBD with less than a core.
const LATENCY_US: u32 = 100;
const PARALLEL: u32 = 4;
const BANDWIDTH_MIB: u32 = 300;
/// Tests fill it repeatedly.
const DISK_BYTES: u64 = if cfg!(test) { 8 << 20 } else { 128 << 20 };
/// The disk that is the whole file.
const WHOLE: &str = "drive";
const HEAD: &str = "A scratch file of `blkmq demo`: it can be removed.\n";
const HEAD_BYTES: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    struct Dir(PathBuf);

    impl Dir {
        fn make(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("blkmq-demo-drive-{name}-{}", std::process::id()));
            fs::create_dir(&dir).unwrap();
            Self(dir)
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn somebody_elses_file_is_refused_and_stays_as_it_is() {
        let dir = Dir::make("other");
        let path = dir.0.join("precious.raw");
        fs::write(&path, "a thesis").unwrap();
        for there in [&path, &dir.0] {
            let error = ScratchFile::make(there, 4 << 20).err().expect("refused");
            let error = format!("{error:#}");
            assert!(
                error.contains(&format!("--file {}: refused", there.display())),
                "{error}"
            );
            assert!(error.contains("name a path where nothing is"), "{error}");
        }
        assert_eq!(fs::read(&path).unwrap(), b"a thesis");
    }

    #[test]
    fn file_that_a_killed_run_left_is_taken_and_removed_in_the_end() {
        let dir = Dir::make("left");
        let path = dir.0.join("drive.raw");
        // Nobody removes it: as after a kill.
        std::mem::forget(ScratchFile::make(&path, 4 << 20).unwrap());
        assert_eq!(fs::metadata(&path).unwrap().len(), 4 << 20);
        drop(ScratchFile::make(&path, 4 << 20).unwrap());
        assert!(!path.exists());
    }

    #[test]
    fn file_in_no_directory_is_an_error_that_names_it() {
        let path = Path::new("/no/such/dir/drive.raw");
        let error = ScratchFile::make(path, 4 << 20).err().expect("refused");
        assert!(format!("{error:#}").contains("--file /no/such/dir/drive.raw: cannot be made"));
    }

    #[test]
    fn parts_of_a_file_leave_its_head_alone_and_do_not_overlap() {
        let drive = Drive {
            names: vec!["a".into(), "b".into()],
            made: Made::File(ScratchFile("/no/such/file".into())),
        };
        let disks = drive.disks("q");
        let linear = |at: usize| disks[at].1[0].1.clone();
        assert_eq!(disks[0].0, WHOLE);
        assert_eq!(linear(1), "drive:1048576:8388608");
        assert_eq!(linear(2), "drive:9437184:8388608");
        assert_eq!(file_bytes(2), 9_437_184 + DISK_BYTES);
    }
}
