//! The rows of clients on a terminal: a table of the cases, one of the goals beside light tenants, and one of the
//! tenants. The value of the worst visit is next to each median.

use crate::report::Row;
use crate::table::{align, digits, nanos};

/// A column: its heading, and its cell in a row.
type Column = (&'static str, fn(&Row) -> String);

/// Draws the tables, from the rows of cases and those of tenants.
pub(super) fn draw(cases: &[Row], tenants: &[Row]) -> String {
    let has_goals = |row: &&Row| row.figures.contains_key("goals_met");
    let with_goals: Vec<Row> = cases.iter().filter(has_goals).cloned().collect();
    let mut tables = vec![table(&CASES, cases)];
    if !with_goals.is_empty() {
        tables.push(table(&GOALS, &with_goals));
    }
    tables.push(table(&TENANTS, tenants));
    tables.join("\n")
}

fn table(columns: &[Column], rows: &[Row]) -> String {
    let heading = columns.iter().map(|(heading, _)| (*heading).to_owned()).collect();
    let line = |row: &Row| columns.iter().map(|(_, cell)| cell(row)).collect();
    let lines: Vec<Vec<String>> = std::iter::once(heading).chain(rows.iter().map(line)).collect();
    align(&lines, 2)
}

fn cell(row: &Row, name: &str, show: fn(f64) -> String) -> String {
    row.figures
        .get(name)
        .map_or_else(|| "-".into(), |value| show(*value))
}

fn percent(part: f64) -> String {
    format!("{:.1} %", 100.0 * part)
}

fn part(part: f64) -> String {
    format!("{part:.2}")
}

const CASES: [Column; 12] = [
    ("case", |row| row.case.clone()),
    ("side", |row| row.side.clone()),
    ("MB/s", |row| cell(row, "mb_per_s", digits)),
    ("of none", |row| cell(row, "bytes_vs_none", part)),
    ("worst", |row| cell(row, "bytes_vs_none_worst", part)),
    ("share error", |row| cell(row, "share_error", percent)),
    ("worst", |row| cell(row, "share_error_worst", percent)),
    ("any second", |row| cell(row, "worst_share_error", percent)),
    ("worst", |row| cell(row, "worst_share_error_worst", percent)),
    ("largest p99", |row| cell(row, "largest_p99_ns", nanos)),
    ("worst", |row| cell(row, "largest_p99_ns_worst", nanos)),
    ("CPU/IO", |row| nanos(row.cpu_ns_per_io)),
];

const GOALS: [Column; 12] = [
    ("case", |row| row.case.clone()),
    ("side", |row| row.side.clone()),
    ("light p50", |row| cell(row, "light_p50_ns", nanos)),
    ("worst", |row| cell(row, "light_p50_ns_worst", nanos)),
    ("of goal", |row| cell(row, "light_p50_of_goal_worst", part)),
    ("light p99", |row| cell(row, "light_p99_ns", nanos)),
    ("worst", |row| cell(row, "light_p99_ns_worst", nanos)),
    ("of goal", |row| cell(row, "light_p99_of_goal_worst", part)),
    ("floods of none", |row| cell(row, "floods_vs_none", part)),
    ("worst", |row| cell(row, "floods_vs_none_worst", part)),
    ("of goal", |row| cell(row, "floods_of_goal_worst", part)),
    ("met", |row| {
        cell(row, "goals_met", |met| format!("{met:.0} of 3"))
    }),
];

const TENANTS: [Column; 13] = [
    ("case", |row| row.case.clone()),
    ("side", |row| row.side.clone()),
    ("MB/s", |row| cell(row, "mb_per_s", digits)),
    ("of due", |row| cell(row, "of_due", part)),
    ("worst", |row| cell(row, "of_due_worst", part)),
    ("of alone", |row| cell(row, "of_alone", part)),
    ("worst", |row| cell(row, "of_alone_worst", part)),
    ("alone of due", |row| cell(row, "alone_of_due", part)),
    ("p50", |row| nanos(row.p50_ns as f64)),
    ("worst", |row| cell(row, "p50_ns_worst", nanos)),
    ("p99", |row| nanos(row.p99_ns as f64)),
    ("worst", |row| cell(row, "p99_ns_worst", nanos)),
    ("p99 vs alone", |row| cell(row, "p99_vs_alone", part)),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figure_stands_beside_its_worst_and_a_dash_where_there_is_none() {
        let mut row = Row {
            case: "tmpfs/1:2/64k/16".into(),
            side: "bfq".into(),
            ..Row::default()
        };
        row.figures.insert("share_error".into(), 0.012);
        row.figures.insert("share_error_worst".into(), 0.57);
        let text = draw(&[row.clone()], &[row.clone()]);
        assert!(text.contains("1.2 %  57.0 %"), "{text}");
        assert!(!text.contains("of goal"), "{text}");
        let tenant = text.lines().last().unwrap();
        assert_eq!(
            tenant.split_whitespace().filter(|word| *word == "-").count(),
            9,
            "{text}"
        );
        row.figures.insert("goals_met".into(), 2.0);
        assert!(draw(&[row.clone()], &[row]).contains("2 of 3"));
    }
}
