//! Tests that fio does its I/O through this library: that it verifies and reports, and that errors
//! state a reason.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output};

#[test]
fn fio_finds_what_it_wrote_on_memory_and_on_a_file() {
    let Some(fio) = Fio::find() else { return };
    let image = Image::new("verify.raw", 32 << 20);
    for disk in ["ram=32M".to_owned(), format!("file={}", image.0.display())] {
        for sched in ["none", "bfq"] {
            let words = format!(
                "--disk={disk} --sched={sched} --rw=randwrite --bsrange=512-64k --blockalign=512 --size=8m \
                 --offset_increment=8m --numjobs=3 --iodepth=16 --fsync=64 --verify=crc32c --verify_fatal=1 --direct=1"
            );
            let report = fio.succeed(&words);
            let (written, read) = (bytes(&report, "write"), bytes(&report, "read"));
            assert!(
                written >= 24 << 20,
                "{disk} {sched}: only {written} bytes written"
            );
            assert!(read >= 24 << 20, "{disk} {sched}: only {read} bytes verified");
        }
    }
}

#[test]
fn changed_byte_is_found_out() {
    let Some(fio) = Fio::find() else { return };
    let image = Image::new("changed.raw", 4 << 20);
    let words = format!(
        "--disk=file={} --rw=write --bs=4k --size=4m --verify=crc32c --verify_fatal=1 --direct=1",
        image.0.display()
    );
    fio.succeed(&format!("{words} --do_verify=0"));
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .open(&image.0)
        .expect("the image is there");
    std::io::Seek::seek(&mut file, std::io::SeekFrom::Start((1 << 20) + 2000)).expect("a place in the image");
    file.write_all(b"changed").expect("the image can be written");
    drop(file);
    let output = fio.run(&format!("{words} --verify_only=1"));
    assert!(!output.status.success(), "the change went unnoticed");
    assert!(text(&output).contains("verify"), "{}", text(&output));
}

#[test]
fn jobs_of_one_process_share_the_drive_by_weight() {
    let Some(fio) = Fio::find() else { return };
    // 16 units of 1 ms do 16 thousand I/Os a second, which a busy machine can request; each job
    // alone requests that many. Options after `--name` apply to one job only, so each job has its
    // own.
    let job = "--disk=null=1G,latency=1ms,parallel=16 --sched=bfq --rw=randread --bs=4k --iodepth=64 --size=1g \
               --time_based --runtime=2 --ramp_time=1";
    let words = format!("{job} --tenant=/a,weight=100 --name=second ENGINE {job} --tenant=/b,weight=300");
    let report = fio.succeed(&words);
    let done = |job: usize| {
        report["jobs"][job]["read"]["total_ios"]
            .as_f64()
            .expect("a number")
    };
    let share = done(1) / (done(0) + done(1));
    assert!(
        (0.73..0.77).contains(&share),
        "a weight of 300 beside 100 got {share} of the drive"
    );
}

#[test]
fn fault_is_reported() {
    let Some(fio) = Fio::find() else { return };
    let null = "--disk=null=1G --rw=read --size=1m";
    for (words, part) in [
        ("--rw=read --size=1m".to_owned(), "disk= is missing"),
        (
            "--disk=nul=1G --rw=read --size=1m".to_owned(),
            "key nul is not known",
        ),
        (format!("{null} --sched=cfq"), "sched=cfq rejected"),
        (format!("{null} --tenant=a"), "as in /customers/a"),
        (format!("{null} --thread=0"), "give fio --thread"),
        (
            "--disk=file=/no/such/file --rw=read --size=1m".to_owned(),
            "/no/such/file",
        ),
    ] {
        let output = fio.run(&words);
        assert!(!output.status.success(), "{words}: fio was content");
        assert!(text(&output).contains(part), "{words}: {}", text(&output));
    }
}

/// fio, with this library as an engine.
struct Fio {
    library: PathBuf,
}

impl Fio {
    /// Finds fio 3.33, or skips the test with a message.
    fn find() -> Option<Self> {
        let version = Command::new("fio").arg("--version").output();
        let version = version.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
        if !version.as_ref().is_ok_and(|version| version == "fio-3.33") {
            blkmq_testkit::skip(&format!(
                "fio 3.33 is needed, found {version:?} (run `cargo xtask setup`)"
            ));
            return None;
        }
        // Cargo builds the shared library into the same directory.
        let own = std::env::current_exe().expect("this program has a path");
        let beside = own.parent().expect("a build directory");
        Some(Self {
            library: beside.join("libblkmq_fio.so"),
        })
    }

    /// Runs one job or several; `ENGINE` precedes the options of each further job.
    fn run(&self, words: &str) -> Output {
        let engine = format!("--ioengine=external:{}", self.library.display());
        Command::new("fio")
            .args([
                "--output-format=json",
                "--thread",
                "--verify_state_save=0",
                "--name=first",
            ])
            .arg(&engine)
            .args(words.replace("ENGINE", &engine).split_whitespace())
            .output()
            .expect("fio runs")
    }

    fn succeed(&self, words: &str) -> serde_json::Value {
        let output = self.run(words);
        assert!(output.status.success(), "{words}: {}", text(&output));
        let said = String::from_utf8_lossy(&output.stdout);
        let json = said.find('{').map_or("", |at| &said[at..]);
        serde_json::from_str(json).unwrap_or_else(|error| panic!("{words}: {error}: {said}"))
    }
}

/// The bytes that all jobs of a run moved in one direction.
fn bytes(report: &serde_json::Value, direction: &str) -> u64 {
    let jobs = report["jobs"].as_array().expect("a list of jobs");
    jobs.iter()
        .filter_map(|job| job[direction]["io_bytes"].as_u64())
        .sum()
}

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// An empty image, which is removed after the test.
struct Image(PathBuf);

impl Image {
    fn new(name: &str, bytes: u64) -> Self {
        let path = std::env::temp_dir().join(format!("blkmq-fio-{}-{name}", std::process::id()));
        let file = std::fs::File::create(&path).expect("the directory for temporary files can be written");
        file.set_len(bytes).expect("there is room for an image");
        Self(path)
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
