//! The tree of an installed blkmq: each file, where it comes from and its mode; and the files that dpkg needs beside
//! them.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::licences;
use crate::place::root;
use crate::steps::run_shown;

/// The tree, laid out in a directory.
pub(super) struct Tree(PathBuf);

impl Tree {
    pub(super) fn make(at: &Path, program: &Path) -> Result<Self> {
        let tree = Self(at.to_owned());
        for (to, from, mode) in FILES {
            tree.put(
                to,
                &fs::read(root().join(from)).with_context(|| (*from).to_owned())?,
                *mode,
            )?;
        }
        let stripped = tree.put("usr/bin/blkmq", &fs::read(program)?, 0o755)?;
        run_shown(Command::new("strip").arg(&stripped))?;
        for (shell, to) in COMPLETIONS {
            let script = printed(program, &["completions", shell])?;
            tree.put(to, &script, 0o644)?;
        }
        for (name, page) in pages(&String::from_utf8(printed(program, &["man"])?)?) {
            tree.put(
                &format!("usr/share/man/man1/{name}.1.gz"),
                &gzip(page.as_bytes())?,
                0o644,
            )?;
        }
        tree.put_documents()?;
        let licences = licences::collect()?;
        tree.put(
            "usr/share/doc/blkmq/dependencies.gz",
            &gzip(licences.as_bytes())?,
            0o644,
        )?;
        Ok(tree)
    }

    pub(super) fn root(&self) -> &Path {
        &self.0
    }

    /// What dpkg reads: the description, the scripts, the names of files that people edit, and sums of all others.
    pub(super) fn write_control(&self, version: &str, arch: &str) -> Result<()> {
        let mut sums = String::new();
        let mut bytes = 0;
        for file in self.files()? {
            let path = file.strip_prefix(&self.0)?.display().to_string();
            bytes += fs::metadata(&file)?.len();
            if !path.starts_with("etc/") {
                let sum = Command::new("md5sum").arg(&path).current_dir(&self.0).output()?;
                sums += &String::from_utf8(sum.stdout)?;
            }
        }
        let depends = depends(&fs::read(self.0.join("usr/bin/blkmq"))?);
        let text = fs::read_to_string(root().join("contrib/debian/control.in"))?;
        let text = text.replace("@VERSION@", version).replace("@ARCH@", arch);
        let text = text
            .replace("@SIZE@", &(bytes / 1024).to_string())
            .replace("@DEPENDS@", &depends);
        self.put("DEBIAN/control", text.as_bytes(), 0o644)?;
        self.put("DEBIAN/md5sums", sums.as_bytes(), 0o644)?;
        self.put("DEBIAN/conffiles", b"/etc/blkmq/blkmq.toml\n", 0o644)?;
        for script in ["postinst", "prerm", "postrm"] {
            let text = fs::read(root().join("contrib/debian").join(script))?;
            self.put(&format!("DEBIAN/{script}"), &text, 0o755)?;
        }
        Ok(())
    }

    /// The changes in Debian's form, for its tools; people read CHANGELOG.md.
    pub(super) fn write_changelog(&self, version: &str, epoch: &str) -> Result<()> {
        let date = Command::new("date")
            .args(["-R", "-u", "-d"])
            .arg(format!("@{epoch}"))
            .output()?;
        let date = String::from_utf8(date.stdout)?;
        let text = format!(
            "blkmq ({version}) unstable; urgency=medium\n\n  * See CHANGELOG.md.gz.\n\n -- The blkmq contributors <blkmq@localhost>  {date}"
        );
        self.put("usr/share/doc/blkmq/changelog.gz", &gzip(text.as_bytes())?, 0o644)?;
        Ok(())
    }

    fn put_documents(&self) -> Result<()> {
        let doc = "usr/share/doc/blkmq";
        let changes = fs::read(root().join("CHANGELOG.md"))?;
        self.put(&format!("{doc}/CHANGELOG.md.gz"), &gzip(&changes)?, 0o644)?;
        for folder in [
            "operate",
            "exports",
            "drivers",
            "mappers",
            "schedulers",
            "commands",
        ] {
            for page in fs::read_dir(root().join("docs").join(folder))? {
                let page = page?.path();
                let name = page.file_name().context("it has a name")?.display().to_string();
                if page.is_file() && !name.starts_with("bench-") {
                    self.put(&format!("{doc}/{folder}/{name}"), &fs::read(&page)?, 0o644)?;
                }
            }
        }
        Ok(())
    }

    fn put(&self, to: &str, content: &[u8], mode: u32) -> Result<PathBuf> {
        let path = self.0.join(to);
        let parent = path.parent().context("it has a directory")?;
        fs::create_dir_all(parent)?;
        // Whatever the mask of this process is.
        for dir in parent.ancestors().take_while(|dir| dir.starts_with(&self.0)) {
            fs::set_permissions(dir, PermissionsExt::from_mode(0o755))?;
        }
        fs::write(&path, content)?;
        fs::set_permissions(&path, PermissionsExt::from_mode(mode))?;
        Ok(path)
    }

    fn files(&self) -> Result<Vec<PathBuf>> {
        let (mut files, mut dirs) = (Vec::new(), vec![self.0.clone()]);
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(&dir)? {
                let path = entry?.path();
                match path.is_dir() {
                    true => dirs.push(path),
                    false => files.push(path),
                }
            }
        }
        files.sort();
        Ok(files)
    }
}

/// What a command prints.
fn printed(program: &Path, words: &[&str]) -> Result<Vec<u8>> {
    let done = Command::new(program)
        .args(words)
        .output()
        .with_context(|| program.display().to_string())?;
    ensure!(done.status.success(), "{} {words:?} failed", program.display());
    Ok(done.stdout)
}

/// The pages of the manual, each with the name of its command.
fn pages(manual: &str) -> Vec<(String, String)> {
    let starts: Vec<usize> = manual.match_indices(PAGE_START).map(|(at, _)| at).collect();
    let ends = starts.iter().skip(1).copied().chain([manual.len()]);
    let pages = starts.iter().zip(ends).map(|(start, end)| &manual[*start..end]);
    let name = |page: &str| {
        let title = page.lines().find_map(|line| line.strip_prefix(".TH "));
        title.and_then(|title| title.split(' ').next()).map(str::to_owned)
    };
    pages
        .filter_map(|page| Some((name(page)?, page.to_owned())))
        .collect()
}

fn gzip(content: &[u8]) -> Result<Vec<u8>> {
    let mut child = Command::new("gzip")
        .args(["-9", "-n"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut input = child.stdin.take().context("stdin is piped")?;
    let content = content.to_owned();
    let writer = std::thread::spawn(move || input.write_all(&content));
    let done = child.wait_with_output()?;
    writer.join().map_err(|_| anyhow::anyhow!("gzip was not fed"))??;
    ensure!(done.status.success(), "gzip failed");
    Ok(done.stdout)
}

/// The packages that the program needs, by the versions of the C library's symbols in it.
fn depends(program: &[u8]) -> String {
    let text = String::from_utf8_lossy(program);
    let versions = text.split("GLIBC_").skip(1).filter_map(|rest| {
        let end = rest.find(|sign: char| sign != '.' && !sign.is_ascii_digit())?;
        let mut parts = rest[..end].split('.').map(|part| part.parse::<u32>().ok());
        Some((parts.next()??, parts.next()??))
    });
    let libc = versions.max().map_or("libc6".to_owned(), |(major, minor)| {
        format!("libc6 (>= {major}.{minor})")
    });
    match text.contains("libgcc_s.so") {
        true => format!("{libc}, libgcc-s1"),
        false => libc,
    }
}

const PAGE_START: &str = ".ie \\n(.g .ds Aq";
/// Where a file is installed, where it comes from, and its mode.
const FILES: &[(&str, &str, u32)] = &[
    ("etc/blkmq/blkmq.toml", "contrib/debian/blkmq.toml", 0o640),
    ("usr/lib/blkmq/blkmq-take-over", "contrib/blkmq-take-over", 0o755),
    (
        "usr/lib/systemd/system/blkmq.service",
        "contrib/blkmq.service",
        0o644,
    ),
    (
        "usr/lib/sysusers.d/blkmq.conf",
        "contrib/blkmq.sysusers.conf",
        0o644,
    ),
    (
        "usr/lib/tmpfiles.d/blkmq.conf",
        "contrib/blkmq.tmpfiles.conf",
        0o644,
    ),
    (
        "usr/lib/udev/rules.d/60-blkmq-ublk.rules",
        "contrib/60-blkmq-ublk.rules",
        0o644,
    ),
    ("usr/share/doc/blkmq/copyright", "contrib/debian/copyright", 0o644),
    (
        "usr/share/doc/blkmq/examples/blkmq.toml",
        "docs/operate/blkmq.toml",
        0o644,
    ),
    (
        "usr/share/doc/blkmq/examples/fuse.conf",
        "contrib/fuse.conf",
        0o644,
    ),
    (
        "usr/share/doc/blkmq/examples/ublk.conf",
        "contrib/ublk.conf",
        0o644,
    ),
    (
        "usr/share/doc/blkmq/examples/blkmq.rules.yml",
        "contrib/prometheus/blkmq.rules.yml",
        0o644,
    ),
    (
        "usr/share/doc/blkmq/examples/grafana.json",
        "contrib/grafana/blkmq.json",
        0o644,
    ),
];
const COMPLETIONS: &[(&str, &str)] = &[
    ("bash", "usr/share/bash-completion/completions/blkmq"),
    ("fish", "usr/share/fish/vendor_completions.d/blkmq.fish"),
    ("zsh", "usr/share/zsh/vendor-completions/_blkmq"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_the_manual_are_named_by_their_titles() {
        let manual = format!("{PAGE_START} x\n.TH blkmq 1 \"\"\na\n{PAGE_START} x\n.TH blkmq-ctl 1\nb\n");
        let pages = pages(&manual);
        let names: Vec<&str> = pages.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["blkmq", "blkmq-ctl"]);
        assert!(pages[1].1.ends_with("b\n") && !pages[0].1.contains("ctl"));
    }

    #[test]
    fn dependencies_of_a_program_follow_from_the_versions_of_its_symbols() {
        let program = b"\0GLIBC_2.4\0GLIBC_2.34\0GLIBC_2.3.4\0libgcc_s.so.1\0";
        assert_eq!(depends(program), "libc6 (>= 2.34), libgcc-s1");
        assert_eq!(depends(b"GLIBC_2.17\0"), "libc6 (>= 2.17)");
    }

    #[test]
    fn files_of_the_package_are_there() {
        for (_, from, _) in FILES {
            assert!(root().join(from).is_file(), "{from}");
        }
    }
}
