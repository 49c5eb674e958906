//! The form of figures in a document: one per cell, with its unit, losses as well as wins; two digits where sides are
//! compared, three where a page shows a whole report.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};

use super::pairs::{Pairs, Verdict};
use super::report::{self, Report, word};

/// Which entries of `figures.toml` a table has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rows {
    /// All of them.
    All,
    /// Those with the key `readme`, which says what README calls them.
    Readme,
}

/// The table of what was measured: a row for each of these entries of `figures.toml`.
///
/// # Errors
/// If an entry is not valid, or names a row or figure that no report has.
pub(super) fn measured(
    which: Rows,
    rows: &toml::Table,
    reports: &BTreeMap<String, Report>,
    instructions: &toml::Table,
) -> Result<String> {
    let rows = rows.get("figure").and_then(toml::Value::as_array);
    let mut table = heading(&[
        "measured",
        "on",
        "ours",
        "the other side",
        "its figure",
        "times better",
        "rounds won",
    ]);
    for row in rows.context("figures.toml has no [[figure]]")? {
        let row = Row(row.as_table().context("a figure is a table")?);
        let what = row.text("what")?;
        let mut cells = row
            .cells(reports, instructions)
            .with_context(|| format!("figure `{what}`"))?;
        match (which, row.text("readme")) {
            (Rows::All, _) => {}
            (Rows::Readme, Ok(name)) => cells[0] = name.to_owned(),
            (Rows::Readme, Err(_)) => continue,
        }
        table += &line(&cells);
    }
    Ok(table)
}

/// An entry of `figures.toml`.
struct Row<'a>(&'a toml::Table);

impl Row<'_> {
    fn cells(&self, reports: &BTreeMap<String, Report>, instructions: &toml::Table) -> Result<Vec<String>> {
        let drive = self.text("on")?;
        ensure!(
            DRIVES.contains(&drive),
            "on = \"{drive}\" rejected: must be one of {DRIVES:?}"
        );
        let what = self.text("what")?.to_owned();
        if let Ok(way) = self.text("instructions") {
            let count = count_of(instructions, way)?;
            return Ok(alone(what, drive, format!("{count:.0} instructions")));
        }
        let report = report::find(reports, self.text("report")?)?;
        let (case, key, unit) = (self.text("case")?, self.text("key")?, self.text("unit")?);
        let side = self.text("side")?;
        let ours = report.figure(case, side, key)?;
        let Ok(other) = self.text("other") else {
            return Ok(alone(what, drive, quantity(ours, unit, two_digits)?));
        };
        let more = match self.text("better")? {
            "more" => true,
            "less" => false,
            word => anyhow::bail!("better = \"{word}\" rejected: must be more or less"),
        };
        let other_case = self.text("other_case").unwrap_or(case);
        let sides = other
            .split('|')
            .map(|side| Ok((side, report.figure(other_case, side, key)?)));
        let sides = sides.collect::<Result<Vec<_>>>()?;
        let best = sides
            .into_iter()
            .reduce(|best, side| if (side.1 > best.1) == more { side } else { best });
        let (other, theirs) = best.context("`other` names nobody")?;
        let of_medians = if more { ours / theirs } else { theirs / ours };
        let pairs = report
            .rounds(case, side, key)
            .zip(report.rounds(other_case, other, key));
        let pairs = pairs.and_then(|(ours, theirs)| Pairs::new(&ours, &theirs, more));
        let verdict = pairs.as_ref().map_or(Verdict::Times(of_medians), Pairs::verdict);
        let name = self.text("other_name").unwrap_or(other).to_owned();
        Ok(vec![
            what,
            drive.into(),
            quantity(ours, unit, two_digits)?,
            name,
            quantity(theirs, unit, two_digits)?,
            match verdict {
                // An error that is nearly zero is no multiple of another.
                _ if key.contains("share_error") => NONE.into(),
                Verdict::Even => "even".into(),
                Verdict::Times(times) if times > TIMES_MAX => format!("> {TIMES_MAX}"),
                Verdict::Times(times) => two_digits(times),
            },
            pairs.map_or_else(|| NONE.into(), |pairs| pairs.shown()),
        ])
    }

    fn text(&self, key: &str) -> Result<&str> {
        let value = self.0.get(key).and_then(toml::Value::as_str);
        value.with_context(|| format!("it has no `{key}`"))
    }
}

/// A row without another side.
fn alone(what: String, drive: &str, ours: String) -> Vec<String> {
    let mut cells = vec![what, drive.to_owned(), ours];
    cells.resize(7, NONE.into());
    cells
}

/// Where each report was made, and the command that repeats it.
pub(super) fn reports(reports: &BTreeMap<String, Report>) -> String {
    let mut table = heading(&[
        "report",
        "commit",
        "rounds",
        "seconds",
        "processor",
        "cores",
        "kernel",
        "command",
    ]);
    for (name, report) in reports {
        table += &line(&[
            format!("[{name}](reports/{name}.json)"),
            report.text("commit").into(),
            report.number("rounds").to_string(),
            report.number("seconds").to_string(),
            report.text("cpu").into(),
            report.number("cores").to_string(),
            report.text("kernel").into(),
            format!("`{}`", typed_today(report.text("command"))),
        ]);
    }
    table
}

/// The command as it is typed today: `blkmq` itself had the benches before `blkmq-lab` did.
fn typed_today(command: &str) -> String {
    command.replacen("blkmq bench ", "blkmq-lab bench ", 1)
}

/// Instructions per I/O for each way.
///
/// # Errors
/// If a way has no count.
pub(super) fn instructions(record: &toml::Table) -> Result<String> {
    let mut table = heading(&["way", "instructions per I/O"]);
    for way in record.keys() {
        table += &line(&[format!("`{way}`"), format!("{:.1}", count_of(record, way)?)]);
    }
    Ok(table)
}

/// Every row of a report, with the figures of `keys` after the usual ones.
///
/// # Errors
/// If a key is not `NAME:UNIT`.
pub(super) fn report(report: &Report, keys: &[&str]) -> Result<String> {
    let usual = ["iops:IOPS", "p50_ns:ns", "p99_ns:ns", "cpu_ns_per_io:ns"];
    let keys: &[&str] = if keys.is_empty() { &usual } else { keys };
    let keys = keys
        .iter()
        .map(|key| {
            key.split_once(':')
                .with_context(|| format!("`{key}` is not NAME:UNIT"))
        })
        .collect::<Result<Vec<_>>>()?;
    let names = keys.iter().map(|(name, _)| {
        HEADINGS
            .iter()
            .find(|(key, _)| key == name)
            .map_or(*name, |(_, heading)| heading)
    });
    let mut table = heading(
        &["case", "side"]
            .into_iter()
            .chain(names)
            .chain(["spread"])
            .collect::<Vec<_>>(),
    );
    for row in report.rows() {
        let mut cells = vec![
            format!("`{}`", word(row, "case")),
            format!("`{}`", word(row, "side")),
        ];
        for (name, unit) in &keys {
            cells.push(match row[name].as_f64() {
                Some(value) => quantity(value, unit, digits)?,
                None => NONE.into(),
            });
        }
        cells.push(spread(row));
        table += &line(&cells);
    }
    Ok(table)
}

/// The difference between the fastest and the slowest round, as a percentage of the median IOPS.
fn spread(row: &serde_json::Value) -> String {
    let rounds: Vec<f64> = row["rounds"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(serde_json::Value::as_f64)
        .collect();
    let low = rounds.iter().copied().fold(f64::INFINITY, f64::min);
    let high = rounds.iter().copied().fold(0.0, f64::max);
    match row["iops"].as_f64() {
        Some(iops) if rounds.len() > 1 && iops > 0.0 => format!("{:.0} %", 100.0 * (high - low) / iops),
        _ => NONE.into(),
    }
}

/// The recorded count of a way.
///
/// # Errors
/// If there is none.
pub(super) fn count_of(record: &toml::Table, way: &str) -> Result<f64> {
    let value = record.get(way).and_then(|entry| entry.get("per_io"));
    let value = value.with_context(|| format!("no instructions of `{way}` are recorded"))?;
    value
        .as_float()
        .or(value.as_integer().map(|n| n as f64))
        .context("it is no number")
}

/// The value with its unit, its number written by `digits`.
fn quantity(value: f64, unit: &str, digits: fn(f64) -> String) -> Result<String> {
    let scaled = |units: &[(f64, &str)]| scaled(value, units, digits);
    Ok(match unit {
        "IOPS" => format!("{} IOPS", scaled(&[(1e6, " M"), (1e3, " K"), (1.0, "")])),
        "MB/s" => format!("{} MB/s", digits(value)),
        "ns" => scaled(&[(1e9, " s"), (1e6, " ms"), (1e3, " µs"), (1.0, " ns")]),
        "s" => format!("{} s", digits(value)),
        "part" => format!("{} %", digits(100.0 * value)),
        "times" => format!("{} times", digits(value)),
        "count" => digits(value),
        _ => anyhow::bail!("unit `{unit}` is not known"),
    })
}

fn scaled(value: f64, units: &[(f64, &str)], digits: fn(f64) -> String) -> String {
    let fits = units.iter().find(|(size, _)| value >= *size);
    let (size, name) = fits.or(units.last()).expect("there are units");
    format!("{}{name}", digits(value / size))
}

/// The value with two digits: what medians of some rounds are good for.
fn two_digits(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    let places = |value: f64| 1 - value.abs().log10().floor() as i32;
    let rounded = |places: i32| (value * 10f64.powi(places)).round() / 10f64.powi(places);
    // 9.96 becomes 10, which has one place less.
    let places = places(rounded(places(value)));
    format!("{:.*}", places.max(0) as usize, rounded(places))
}

/// The value with three digits.
fn digits(value: f64) -> String {
    match value {
        n if n >= 99.95 => format!("{n:.0}"),
        n if n >= 9.995 => format!("{n:.1}"),
        n if n >= 0.005 || n == 0.0 => format!("{n:.2}"),
        n if n >= 0.0001 => format!("{n:.4}"),
        n => format!("{n:.0e}"),
    }
}

fn heading(cells: &[&str]) -> String {
    let names: Vec<String> = cells.iter().map(|cell| (*cell).to_owned()).collect();
    line(&names) + &format!("|{}\n", "---|".repeat(cells.len()))
}

fn line(cells: &[String]) -> String {
    format!("| {} |\n", cells.join(" | "))
}

/// A cell without a figure.
const NONE: &str = "–";
/// Where a figure may be measured.
const DRIVES: [&str; 6] = [
    "modelled drive",
    "null device",
    "real file",
    "loop",
    "memory",
    "model, virtual time",
];
/// A larger ratio says no more, because one of its figures is near zero.
const TIMES_MAX: f64 = 100.0;
const HEADINGS: [(&str, &str); 4] = [
    ("iops", "IOPS"),
    ("p50_ns", "p50"),
    ("p99_ns", "p99"),
    ("cpu_ns_per_io", "CPU/IO"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_two_or_three_digits_and_a_unit() {
        let three = |value, unit| quantity(value, unit, digits).unwrap();
        assert_eq!(three(23_512_345.0, "IOPS"), "23.5 M IOPS");
        assert_eq!(three(1_400.0, "ns"), "1.40 µs");
        assert_eq!(three(0.0012, "part"), "0.12 %");
        assert_eq!(three(99.96, "MB/s"), "100 MB/s");
        assert!(quantity(1.0, "furlong", digits).is_err());
        let two = |value, unit| quantity(value, unit, two_digits).unwrap();
        assert_eq!(two(23_512_345.0, "IOPS"), "24 M IOPS");
        assert_eq!(two(1_400.0, "ns"), "1.4 µs");
        assert_eq!(two(0.0007, "part"), "0.070 %");
        assert_eq!(two(1.342, "part"), "130 %");
        assert_eq!(
            [1285.0, 9.96, 0.996, 0.0, 0.855].map(two_digits),
            ["1300", "10", "1.0", "0", "0.86"]
        );
    }

    #[test]
    fn commands_of_old_reports_name_the_laboratory() {
        let old = "blkmq bench engine --jobs 1";
        assert_eq!(typed_today(old), "blkmq-lab bench engine --jobs 1");
        assert_eq!(typed_today(&typed_today(old)), typed_today(old));
    }

    #[test]
    fn loss_is_below_one_whichever_way_is_better() {
        let json = r#"{"bench": "b", "commit": "c", "command": "x", "rounds": 1, "seconds": 1, "host": {"kernel": "k", "cpu": "p"},
            "rows": [{"case": "c", "side": "ours", "iops": 1.0, "p99_ns": 20.0, "rounds": [1.0]},
                     {"case": "c", "side": "peer", "iops": 2.0, "p99_ns": 10.0, "rounds": [2.0]},
                     {"case": "c", "side": "slow", "iops": 0.5, "p99_ns": 40.0, "rounds": [0.5]}]}"#;
        let reports = BTreeMap::from([("r".to_owned(), Report::parse(json).unwrap())]);
        let table = |key: &str, better: &str, on: &str| {
            let entry = format!(
                "[[figure]]\nwhat = \"w\"\non = \"{on}\"\nreport = \"r\"\ncase = \"c\"\nkey = \"{key}\"\nunit = \"ns\"\n\
                 side = \"ours\"\nother = \"slow|peer|ours\"\nbetter = \"{better}\"\n"
            );
            let entry = entry.parse().unwrap();
            measured(Rows::All, &entry, &reports, &toml::Table::new())
        };
        for (key, better) in [("iops", "more"), ("p99_ns", "less")] {
            let table = table(key, better, "null device").unwrap();
            let won = if key == "iops" { "0 of 1" } else { "–" };
            assert!(table.ends_with(&format!("| 0.50 | {won} |\n")), "{table}");
        }
        let best = table("iops", "more", "loop").unwrap();
        assert!(best.contains("| peer | 2.0 ns |"), "{best}");
        assert!(table("iops", "more", "a drive").is_err());
        assert!(table("iops", "maybe", "loop").is_err() && table("p50_ns", "less", "loop").is_err());
    }

    #[test]
    fn rounds_are_paired_and_share_errors_are_no_multiples() {
        let json = r#"{"bench": "b", "commit": "c", "command": "x", "rounds": 3, "seconds": 1, "host": {"kernel": "k", "cpu": "p"},
            "rows": [{"case": "c", "side": "ours", "iops": 2.0, "p99_ns": 10.0, "share_error": 0.01, "rounds": [2.0, 1.0, 2.0],
                      "by_round": {"p99_ns": [10.0, 10.0, 10.0]}},
                     {"case": "c", "side": "peer", "iops": 1.5, "p99_ns": 20.0, "share_error": 0.5, "rounds": [1.0, 2.0, 1.5],
                      "by_round": {"p99_ns": [20.0, 40.0, 5.0]}}]}"#;
        let reports = BTreeMap::from([("r".to_owned(), Report::parse(json).unwrap())]);
        let last = |key: &str, better: &str| {
            let entry = format!(
                "[[figure]]\nwhat = \"w\"\non = \"loop\"\nreport = \"r\"\ncase = \"c\"\nkey = \"{key}\"\nunit = \"part\"\n\
                 side = \"ours\"\nother = \"peer\"\nbetter = \"{better}\"\n"
            );
            let table = measured(Rows::All, &entry.parse().unwrap(), &reports, &toml::Table::new()).unwrap();
            let cells: Vec<String> = table
                .lines()
                .last()
                .unwrap()
                .split(" | ")
                .map(str::to_owned)
                .collect();
            cells[5..].join(" | ")
        };
        assert_eq!(last("iops", "more"), "1.3 | 2 of 3 |");
        assert_eq!(last("p99_ns", "less"), "2.0 | 2 of 3 |");
        assert_eq!(last("share_error", "less"), "– | – |");
    }

    #[test]
    fn readme_has_the_rows_that_name_it_by_their_other_names() {
        let entry = "[[figure]]\nwhat = \"count\"\non = \"null device\"\ninstructions = \"direct\"\n";
        let entries = format!("{entry}readme = \"whole name\"\n{entry}");
        let counts = "[direct]\nper_io = 4.0\n".parse().unwrap();
        let lines = |which| {
            let table = measured(which, &entries.parse().unwrap(), &BTreeMap::new(), &counts).unwrap();
            table.lines().skip(2).map(str::to_owned).collect::<Vec<_>>()
        };
        let readme = lines(Rows::Readme);
        assert!(
            readme.len() == 1 && readme[0].starts_with("| whole name |"),
            "{readme:?}"
        );
        let all = lines(Rows::All);
        assert!(all.len() == 2 && all[0].starts_with("| count |"), "{all:?}");
    }
}
