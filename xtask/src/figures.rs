//! The tables of figures: their content comes only from report files, and nothing is typed by hand.
//!
//! `docs/benchmarks/figures.toml` names the rows of the table on `docs/benchmarks/measured.md`, and
//! which of them README has; the reports, JSON as written by
//! `blkmq-lab bench --json`, are in `docs/benchmarks/reports`. A test fails if a document differs from
//! them.

mod age;
mod pairs;
mod report;
mod table;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use self::report::Report;
use self::table::Rows;
use crate::place::root;

/// What to do besides writing the tables.
#[derive(Debug, clap::Args)]
pub(crate) struct Wish {
    /// Reports to add
    #[arg(value_name = "REPORT.json")]
    reports: Vec<String>,
    /// Add them although they have few or short rounds, or the machine was busy
    #[arg(long)]
    force: bool,
    /// Fail if a report is older than the code that it measured
    #[arg(long)]
    strict: bool,
}

/// Rewrites every table of figures, after adding new reports, and names reports that are older than the code that they
/// measured.
///
/// # Errors
/// If a report or a document cannot be read or written, or a row names something that no report has; if there is an old
/// report and the wish is strict.
pub(crate) fn run(wish: &Wish) -> Result<()> {
    for file in &wish.reports {
        let name = report::take_in(Path::new(file), &root().join(REPORTS), wish.force)?;
        println!("took {name}");
    }
    for (path, _, now) in documents()?.iter().filter(|(_, before, now)| before != now) {
        fs::write(root().join(path), now).with_context(|| format!("writing {path}"))?;
        println!("wrote {path}");
    }
    let old = warn_of_old()?;
    ensure!(
        !wish.strict || old == 0,
        "{old} reports are older than the code that they measured: repeat their commands"
    );
    Ok(())
}

/// Prints the reports that are older than the code that they measured, and returns their number.
///
/// # Errors
/// If a report cannot be read, or git cannot be asked.
pub(crate) fn warn_of_old() -> Result<usize> {
    let source = Source::read()?;
    let old = age::old(&source.reports, &source.instructions)?;
    for line in &old {
        println!("    warning: old report {line}");
    }
    Ok(old.len())
}

/// Each document with tables of figures: its path, its present text, and its text according to the
/// reports.
fn documents() -> Result<Vec<(String, String, String)>> {
    let source = Source::read()?;
    let mut documents = Vec::new();
    for path in paths()? {
        let text = fs::read_to_string(root().join(&path)).with_context(|| format!("reading {path}"))?;
        let now = source.fill(&text).with_context(|| path.clone())?;
        documents.push((path, text, now));
    }
    Ok(documents)
}

/// The documents that may have such tables.
fn paths() -> Result<Vec<String>> {
    let mut paths = vec!["README.md".to_owned()];
    let dir = "docs/benchmarks";
    for entry in fs::read_dir(root().join(dir)).with_context(|| format!("reading {dir}"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".md") {
            paths.push(format!("{dir}/{name}"));
        }
    }
    paths.sort();
    Ok(paths)
}

/// The sources of the tables.
struct Source {
    rows: toml::Table,
    reports: BTreeMap<String, Report>,
    instructions: toml::Table,
}

impl Source {
    fn read() -> Result<Source> {
        let toml = |path: &str| -> Result<toml::Table> {
            let text = fs::read_to_string(root().join(path)).with_context(|| format!("reading {path}"))?;
            text.parse().with_context(|| format!("reading {path}"))
        };
        Ok(Source {
            rows: toml(ROWS)?,
            reports: report::read_all(&root().join(REPORTS))?,
            instructions: toml(INSTRUCTIONS)?,
        })
    }

    /// The text with the content between each pair of markers replaced.
    fn fill(&self, text: &str) -> Result<String> {
        let mut filled = String::new();
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            filled += &format!("{line}\n");
            let Some(what) = marker(line) else { continue };
            ensure!(what != END, "a marker `{END}` without a beginning");
            filled += &format!("\n{}\n", self.table(what)?);
            let end = lines.find(|line| marker(line) == Some(END));
            filled += &format!("{}\n", end.with_context(|| format!("`{what}` has no end"))?);
        }
        Ok(filled)
    }

    fn table(&self, what: &str) -> Result<String> {
        let words: Vec<&str> = what.split_whitespace().collect();
        match words[..] {
            ["measured"] => table::measured(Rows::All, &self.rows, &self.reports, &self.instructions),
            ["readme"] => table::measured(Rows::Readme, &self.rows, &self.reports, &self.instructions),
            ["reports"] => Ok(table::reports(&self.reports)),
            ["instructions"] => table::instructions(&self.instructions),
            ["report", name, ref keys @ ..] => table::report(report::find(&self.reports, name)?, keys),
            _ => bail!("`{what}`: there is no such table of figures"),
        }
    }
}

/// The words in a marker: `<!-- figures: WHAT -->`.
fn marker(line: &str) -> Option<&str> {
    line.strip_prefix("<!-- figures: ")?.strip_suffix(" -->")
}

const END: &str = "end";
const ROWS: &str = "docs/benchmarks/figures.toml";
const REPORTS: &str = "docs/benchmarks/reports";
const INSTRUCTIONS: &str = "bench/instructions.toml";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_document_differs_from_the_reports() {
        for (path, text, now) in documents().unwrap() {
            assert!(
                text == now,
                "{path} differs from the reports: run `cargo xtask figures`"
            );
        }
    }

    #[test]
    fn figure_that_was_typed_by_hand_is_found() {
        let source = Source::read().unwrap();
        let readme = fs::read_to_string(root().join("README.md")).unwrap();
        let row = readme
            .lines()
            .find(|line| line.contains("| null device |"))
            .expect("README has a row of figures");
        let forged = readme.replacen(
            row,
            &row.replacen("| null device |", "| null device | 99 M IOPS |", 1),
            1,
        );
        assert_ne!(forged, readme);
        assert_eq!(source.fill(&forged).unwrap(), readme);
    }

    #[test]
    fn readme_has_about_ten_figures_and_two_losses_among_them() {
        let source = Source::read().unwrap();
        let table = source.table("readme").unwrap();
        let ratio = |line: &str| line.split(" | ").nth(5)?.parse::<f64>().ok();
        let losses = table.lines().filter_map(ratio).filter(|times| *times < 1.0);
        assert!(losses.count() >= 2, "{table}");
        assert!((10..=14).contains(&(table.lines().count() - 2)), "{table}");
    }

    #[test]
    fn every_report_belongs_to_a_table() {
        let all: String = paths()
            .unwrap()
            .iter()
            .map(|path| fs::read_to_string(root().join(path)).unwrap())
            .collect();
        let rows = fs::read_to_string(root().join(ROWS)).unwrap();
        for entry in fs::read_dir(root().join(REPORTS)).unwrap() {
            let name = entry.unwrap().file_name().to_string_lossy().into_owned();
            let name = name.trim_end_matches(".json").to_owned();
            let is_used =
                all.contains(&format!("figures: report {name}")) || rows.contains(&format!("\"{name}\""));
            assert!(is_used, "no table uses the report {name}");
        }
    }

    #[test]
    fn marker_without_its_end_is_an_error() {
        let source = Source::read().unwrap();
        assert!(source.fill("<!-- figures: reports -->\n").is_err());
        assert!(source.fill("<!-- figures: end -->\n").is_err());
        assert!(
            source
                .fill("<!-- figures: guesses -->\n<!-- figures: end -->\n")
                .is_err()
        );
        assert_eq!(source.fill("text\n").unwrap(), "text\n");
    }
}
