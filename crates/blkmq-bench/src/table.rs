//! The rows of a report on a terminal: one line each, columns aligned, numbers with their significant digits.
//! It does not use `comfy-table`: padding takes ten lines, and borders, wrapping and terminal widths would
//! disturb `awk` and reports that are pasted into a document.

use std::collections::BTreeSet;

use crate::report::Row;

/// Draws the table, one line per row, under a heading; each of the bench's own figures has one more
/// column.
pub(crate) fn draw(rows: &[Row]) -> String {
    let figures: BTreeSet<&String> = rows.iter().flat_map(|row| row.figures.keys()).collect();
    let headings = HEADINGS.iter().map(|heading| (*heading).to_owned());
    let mut lines: Vec<Vec<String>> = vec![
        headings
            .chain(figures.iter().map(|name| (*name).clone()))
            .collect(),
    ];
    for row in rows {
        let figure = |name: &&String| row.figures.get(*name).map_or("-".into(), |value| digits(*value));
        lines.push(cells(row).into_iter().chain(figures.iter().map(figure)).collect());
    }
    align(&lines, 2)
}

/// Aligns the cells of lines of equal length: the first columns, names, to the left, numbers to the
/// right.
pub(crate) fn align(lines: &[Vec<String>], names: usize) -> String {
    let widths: Vec<usize> = (0..lines[0].len())
        .map(|column| lines.iter().map(|line| line[column].chars().count()).max())
        .map(Option::unwrap_or_default)
        .collect();
    let mut text = String::new();
    for line in lines {
        let padded = line.iter().enumerate().map(|(column, cell)| {
            let pad = " ".repeat(widths[column] - cell.chars().count());
            if column < names {
                cell.clone() + &pad
            } else {
                pad + cell
            }
        });
        let joined = padded.collect::<Vec<_>>().join("  ");
        text += joined.trim_end();
        text.push('\n');
    }
    text
}

fn cells(row: &Row) -> [String; COLUMNS] {
    let (low, high) = row.spread();
    [
        row.case.clone(),
        row.side.clone(),
        count(row.iops),
        format!("{}–{}", count(low), count(high)),
        nanos(row.p50_ns as f64),
        nanos(row.p99_ns as f64),
        nanos(row.p999_ns as f64),
        nanos(row.cpu_ns_per_io),
        per_core(row.cpu_ns_per_io),
        share(row.ctx_per_io),
    ]
}

/// Writes a number of things with three digits and a unit: `23.8 M`.
pub(crate) fn count(number: f64) -> String {
    let (scaled, unit) = match number {
        n if n >= 1e9 => (n / 1e9, " G"),
        n if n >= 1e6 => (n / 1e6, " M"),
        n if n >= 1e3 => (n / 1e3, " K"),
        n => (n, ""),
    };
    format!("{}{unit}", digits(scaled))
}

/// Writes a duration with three digits and a unit: `15.2 µs`.
pub(crate) fn nanos(ns: f64) -> String {
    let (scaled, unit) = match ns {
        n if n >= 1e9 => (n / 1e9, "s"),
        n if n >= 1e6 => (n / 1e6, "ms"),
        n if n >= 1e3 => (n / 1e3, "µs"),
        n => (n, "ns"),
    };
    format!("{} {unit}", digits(scaled))
}

/// The I/Os per second that one core would do if it were busy all the time.
fn per_core(cpu_ns_per_io: f64) -> String {
    if cpu_ns_per_io > 0.0 {
        count(1e9 / cpu_ns_per_io)
    } else {
        "-".into()
    }
}

/// Context switches per I/O, which range from many to one in millions.
fn share(ratio: f64) -> String {
    match ratio {
        0.0 => "0".into(),
        r if r < 0.001 => format!("{r:.0e}"),
        r => format!("{r:.3}"),
    }
}

pub(crate) fn digits(number: f64) -> String {
    match number {
        n if n >= 100.0 => format!("{n:.0}"),
        n if n >= 10.0 => format!("{n:.1}"),
        n if n >= 1.0 || n == 0.0 => format!("{n:.2}"),
        n => format!("{n:.3}"),
    }
}

const COLUMNS: usize = 10;
const HEADINGS: [&str; COLUMNS] = [
    "case",
    "side",
    "IOPS",
    "min–max",
    "p50",
    "p99",
    "p99.9",
    "CPU/IO",
    "IOPS/core",
    "switches/IO",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_with_three_digits_and_a_unit() {
        assert_eq!(count(23_812_345.0), "23.8 M");
        assert_eq!(count(174_400.0), "174 K");
        assert_eq!(count(12.0), "12.0");
        assert_eq!(nanos(41.7), "41.7 ns");
        assert_eq!(nanos(15_200.0), "15.2 µs");
        assert_eq!(share(0.000_012), "1e-5");
    }

    #[test]
    fn columns_are_aligned_whatever_is_in_them() {
        let row = |case: &str, iops| Row {
            case: case.into(),
            side: "ours".into(),
            iops,
            rounds: vec![iops],
            ..Row::default()
        };
        let text = draw(&[row("short", 1.0), row("a/much/longer/case", 12_345_678.0)]);
        let ends: Vec<usize> = text.lines().skip(1).map(|line| line.chars().count()).collect();
        assert_eq!(ends[0], ends[1], "{text}");
        assert!(text.contains("12.3 M"));
    }

    #[test]
    fn figure_of_one_row_alone_has_a_column() {
        let mut rows = [Row::default(), Row::default()];
        rows[1].figures.insert("jain".into(), 0.5);
        let text = draw(&rows);
        let ends: Vec<&str> = text
            .lines()
            .map(|line| line.rsplit(' ').next().unwrap())
            .collect();
        assert_eq!(ends, ["jain", "-", "0.500"]);
    }
}
