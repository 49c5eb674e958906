//! A report as a picture: a bar per row on one scale, whiskers from the slowest to the fastest round, latency
//! and CPU as text next to it. It does not use `plotters`: bars with text are only text and rectangles, and
//! need none of its axes.

use std::fmt::Write;

use crate::report::{Report, Row};
use crate::table::{count, nanos};

/// Draws the report.
pub(crate) fn draw(report: &Report) -> String {
    let sides = sides(&report.rows);
    let groups = groups(&report.rows);
    let height = TOP + report.rows.len() * BAR_STEP + groups * GROUP_GAP + BOTTOM;
    let scale = Scale::for_rows(&report.rows);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"system-ui, sans-serif\" font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n"
    );
    heading(&mut svg, report, &sides);
    axis(&mut svg, &scale, height);
    bars(&mut svg, &report.rows, &sides, &scale);
    text(
        &mut svg,
        LEFT_EDGE,
        height - 10,
        "#777",
        "start",
        11,
        &report.circumstances(),
    );
    svg + "</svg>\n"
}

/// From I/Os per second to the width of a bar: linear from zero, up to a round number.
struct Scale {
    step: f64,
    steps: usize,
}

impl Scale {
    fn for_rows(rows: &[Row]) -> Self {
        let high = rows
            .iter()
            .map(|row| row.spread().1.max(row.iops))
            .fold(1.0, f64::max);
        let step = round_step(high / STEPS_MAX as f64);
        Self {
            step,
            steps: (high / step).ceil() as usize,
        }
    }

    fn x(&self, iops: f64) -> f64 {
        BARS_LEFT as f64 + iops / (self.step * self.steps as f64) * BARS_WIDTH as f64
    }
}

/// The smallest 1, 2, 2.5 or 5 times a power of ten that is not less than `at_least`.
fn round_step(at_least: f64) -> f64 {
    let power = 10f64.powf(at_least.max(1e-9).log10().floor());
    [1.0, 2.0, 2.5, 5.0, 10.0]
        .map(|factor| factor * power)
        .into_iter()
        .find(|step| *step >= at_least)
        .unwrap_or(10.0 * power)
}

fn heading(svg: &mut String, report: &Report, sides: &[&str]) {
    let title = format!("blkmq-lab bench {}: {}", report.bench, report.about.question);
    text(svg, LEFT_EDGE, 24, "#111", "start", 16, &title);
    for (line, setting) in report.about.setting.iter().take(2).enumerate() {
        text(svg, LEFT_EDGE, 42 + line * 15, "#555", "start", 11, setting);
    }
    let mut x = BARS_LEFT;
    for (index, side) in sides.iter().enumerate() {
        rect(svg, x as f64, 72.0, 12.0, 12.0, colour(index));
        text(svg, x + 17, 82, "#333", "start", 12, side);
        x += 34 + side.chars().count() * 7;
    }
}

/// Grid lines with their labels.
fn axis(svg: &mut String, scale: &Scale, height: usize) {
    for step in 0..=scale.steps {
        let iops = scale.step * step as f64;
        let x = scale.x(iops);
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" y1=\"{}\" x2=\"{x:.1}\" y2=\"{}\" stroke=\"#ddd\"/>",
            TOP - 8,
            height - BOTTOM
        );
        let label = if step == 0 { "0".into() } else { count(iops) };
        text(
            svg,
            x as usize,
            height - BOTTOM + 14,
            "#555",
            "middle",
            11,
            &label,
        );
    }
    let x = BARS_LEFT + BARS_WIDTH;
    text(
        svg,
        x + 8,
        height - BOTTOM + 14,
        "#555",
        "start",
        11,
        "I/Os per second",
    );
}

fn bars(svg: &mut String, rows: &[Row], sides: &[&str], scale: &Scale) {
    let mut y = TOP;
    let mut case = "";
    for row in rows {
        if row.case != case {
            case = &row.case;
            y += GROUP_GAP;
            text(svg, BARS_LEFT - 8, y + 12, "#333", "end", 11, case);
        }
        bar(svg, row, y as f64, side_colour(sides, row), scale);
        y += BAR_STEP;
    }
}

fn bar(svg: &mut String, row: &Row, y: f64, fill: &str, scale: &Scale) {
    let (low, high) = row.spread();
    let (left, right) = (scale.x(0.0), scale.x(row.iops));
    rect(svg, left, y + 2.0, right - left, BAR_STEP as f64 - 4.0, fill);
    let middle = y + BAR_STEP as f64 / 2.0;
    let _ = writeln!(
        svg,
        "<line x1=\"{:.1}\" y1=\"{middle}\" x2=\"{:.1}\" y2=\"{middle}\" stroke=\"#111\" stroke-width=\"1.5\"/>",
        scale.x(low),
        scale.x(high)
    );
    let words = format!(
        "{}  ·  p50 {}  p99 {}  ·  CPU {} per I/O",
        count(row.iops),
        nanos(row.p50_ns as f64),
        nanos(row.p99_ns as f64),
        nanos(row.cpu_ns_per_io)
    );
    let x = scale.x(high.max(row.iops)) as usize + 8;
    text(svg, x, middle as usize + 4, "#333", "start", 11, &words);
}

pub(crate) fn rect(svg: &mut String, x: f64, y: f64, width: f64, height: f64, fill: &str) {
    let _ = writeln!(
        svg,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{height:.1}\" rx=\"2\" fill=\"{fill}\"/>",
        width.max(0.5)
    );
}

pub(crate) fn text(svg: &mut String, x: usize, y: usize, fill: &str, anchor: &str, size: usize, words: &str) {
    let words = words
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;");
    let _ = writeln!(
        svg,
        "<text x=\"{x}\" y=\"{y}\" fill=\"{fill}\" text-anchor=\"{anchor}\" font-size=\"{size}\">{words}</text>"
    );
}

/// The sides in the order of their first appearance, which chooses their colours.
fn sides(rows: &[Row]) -> Vec<&str> {
    let mut sides: Vec<&str> = Vec::new();
    for row in rows {
        if !sides.contains(&row.side.as_str()) {
            sides.push(&row.side);
        }
    }
    sides
}

fn groups(rows: &[Row]) -> usize {
    let changes = rows.windows(2).filter(|pair| pair[0].case != pair[1].case);
    changes.count() + usize::from(!rows.is_empty())
}

fn side_colour(sides: &[&str], row: &Row) -> &'static str {
    colour(
        sides
            .iter()
            .position(|side| *side == row.side)
            .unwrap_or_default(),
    )
}

pub(crate) fn colour(index: usize) -> &'static str {
    COLOURS[index % COLOURS.len()]
}

/// Colours that people with any colour vision can distinguish (after Okabe and Ito), pale enough
/// for a black whisker.
const COLOURS: [&str; 6] = ["#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#999999"];
const WIDTH: usize = 1160;
const LEFT_EDGE: usize = 16;
const BARS_LEFT: usize = 240;
const BARS_WIDTH: usize = 520;
const TOP: usize = 96;
const BOTTOM: usize = 46;
const BAR_STEP: usize = 18;
const GROUP_GAP: usize = 6;
const STEPS_MAX: usize = 5;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::About;

    #[test]
    fn picture_has_a_bar_per_row_and_escapes_what_it_is_told() {
        let row = |case: &str, side: &str, iops| Row {
            case: case.into(),
            side: side.into(),
            iops,
            rounds: vec![iops * 0.9, iops * 1.1],
            ..Row::default()
        };
        let report = Report {
            bench: "nbd".into(),
            commit: "c".into(),
            host: Default::default(),
            command: String::new(),
            programs: Vec::new(),
            rounds: 1,
            seconds: 1.0,
            rows: vec![
                row("a<b", "ours", 3e6),
                row("a<b", "nbdkit", 1e6),
                row("c", "ours", 2e6),
            ],
            about: About {
                question: "ours & theirs?".into(),
                setting: Vec::new(),
            },
        };
        let svg = draw(&report);
        // The background, two colours in the legend, and three bars.
        assert_eq!(svg.matches("<rect").count(), 1 + 2 + 3);
        assert!(svg.contains("a&lt;b") && svg.contains("ours &amp; theirs?"));
        assert!(svg.ends_with("</svg>\n"));
    }

    #[test]
    fn scale_ends_at_a_round_number_above_the_fastest_round() {
        assert_eq!(round_step(0.9e6), 1e6);
        assert_eq!(round_step(2.1e6), 2.5e6);
        assert_eq!(round_step(6.0), 10.0);
        let rows = [Row {
            iops: 23.8e6,
            rounds: vec![25.2e6],
            ..Row::default()
        }];
        let scale = Scale::for_rows(&rows);
        assert!(scale.step * scale.steps as f64 >= 25.2e6);
        assert!(scale.x(25.2e6) <= (BARS_LEFT + BARS_WIDTH) as f64);
    }
}
