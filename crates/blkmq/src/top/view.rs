//! The layout of the screen: a head, lines with as many columns as fit, and a line of keys at the foot.

mod help;

use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::widgets::{RenderDirection, Sparkline, Widget};

use super::columns::{COLUMNS, Column, fitting};
use super::state::{Fold, Line, Mode, Shape, Sort, State};
use super::tree::{AT_CAP, Key, Numbers, Row};
use crate::units::{count, size};

/// The numbers of the columns on a screen of this width.
pub(super) fn shown(width: u16) -> Vec<usize> {
    let fitting = fitting(width);
    let is_shown = |column: &&Column| fitting.iter().any(|shown| shown.title == column.title);
    let numbered = COLUMNS.iter().enumerate();
    numbered
        .filter(|(_, column)| is_shown(column))
        .map(|(number, _)| number)
        .collect()
}

/// Draws everything. Records how many lines fit.
pub(super) fn draw(frame: &mut Frame<'_>, state: &mut State) {
    let area = frame.area();
    let buffer = frame.buffer_mut();
    let columns = fitting(area.width);
    state.page = usize::from(area.height).saturating_sub(HEAD_LINES + 2);
    scroll(state);
    if state.mode == Mode::Help {
        help::draw(buffer, area, &columns);
    } else {
        draw_head(buffer, area, state);
        draw_titles(buffer, row_of(area, HEAD_LINES), state, &columns);
        let lines = state.lines.iter().enumerate().skip(state.top).take(state.page);
        let selected = state.selected_line();
        for (number, line) in lines {
            let row = row_of(area, HEAD_LINES + 1 + number - state.top);
            draw_line(buffer, row, line, &columns, selected == Some(number));
        }
    }
    draw_foot(
        buffer,
        row_of(area, usize::from(area.height).saturating_sub(1)),
        state,
    );
}

/// Scrolls so that the selected line is on the screen.
fn scroll(state: &mut State) {
    let selected = state.selected_line().unwrap_or(0);
    let last = state.lines.len().saturating_sub(state.page);
    let first = (selected + 1).saturating_sub(state.page);
    state.top = state.top.clamp(first, selected.max(first)).min(last.max(first));
}

fn draw_head(buffer: &mut Buffer, area: Rect, state: &State) {
    let head = &state.head;
    let there_is = format!(
        "blkmq {}  up {}  {}  {}  {}  {}",
        env!("CARGO_PKG_VERSION"),
        duration(head.uptime_s),
        several(head.queues, "queue"),
        several(head.groups, "group"),
        several(head.disks, "disk"),
        several(head.connections as usize, "connection"),
    );
    put(buffer, row_of(area, 0), &there_is, Style::new());
    let does = format!(
        "IOPS {}  read {}/s  written {}/s  in flight {}  NBD memory {} of {}",
        count(head.iops),
        size(head.read_bytes),
        size(head.written_bytes),
        head.in_flight,
        size(head.memory_used as f64),
        size(head.memory_max as f64),
    );
    put(buffer, row_of(area, 1), &does, Style::new());
    draw_history(buffer, row_of(area, 2), state);
    draw_status(buffer, row_of(area, 3), state);
}

fn draw_history(buffer: &mut Buffer, area: Rect, state: &State) {
    let Some((row, history)) = state.history() else {
        return;
    };
    let most = history.iter().copied().max().unwrap_or(0);
    let label = format!("IOPS of {}, up to {}: ", path_of(row), count(most as f64));
    put(buffer, area, &label, Style::new());
    let used = (label.chars().count() as u16).min(area.width);
    let rest = Rect {
        x: area.x + used,
        width: area.width - used,
        ..area
    };
    Sparkline::default()
        .data(history.iter().rev())
        .max(most.max(1))
        .direction(RenderDirection::RightToLeft)
        .style(Style::new().fg(Color::Cyan))
        .render(rest, buffer);
}

/// Typed text, or an error; and how lines are arranged.
fn draw_status(buffer: &mut Buffer, area: Rect, state: &State) {
    let order = match (state.sort, state.is_reversed) {
        (Sort::Name, false) => "by name".to_owned(),
        (Sort::Name, true) => "by name, last first".to_owned(),
        (Sort::Column(column), false) => format!("by {}", COLUMNS[column].title),
        (Sort::Column(column), true) => format!("by {}, least first", COLUMNS[column].title),
    };
    let mut arranged = format!(
        "{} {order}",
        if state.shape == Shape::Tree {
            "tree"
        } else {
            "list"
        }
    );
    if state.hides_idle {
        arranged += ", without idle";
    }
    let width = arranged.chars().count() as u16;
    let right = Rect {
        x: area.x + area.width.saturating_sub(width),
        width: width.min(area.width),
        ..area
    };
    put(buffer, right, &arranged, Style::new());
    let left = Rect {
        width: area.width.saturating_sub(width + 1),
        ..area
    };
    let warning = Style::new().fg(Color::Yellow).add_modifier(Modifier::BOLD);
    let (text, style) = match (state.mode, &state.lost) {
        (Mode::Search, _) => (format!("Search: {}_", state.sought), Style::new()),
        (Mode::Filter, _) => (format!("Filter: {}_", state.filter), Style::new()),
        (_, Some(why)) => (format!("trying again: {why}"), warning),
        _ if state.is_frozen => ("frozen".to_owned(), warning),
        _ if !state.filter.is_empty() => (format!("filter: {}", state.filter), warning),
        _ => (format!("every {:.1} s", state.head.seconds), Style::new()),
    };
    put(buffer, left, &text, style);
}

fn draw_titles(buffer: &mut Buffer, area: Rect, state: &State, columns: &[&Column]) {
    let style = Style::new().add_modifier(Modifier::REVERSED);
    put(buffer, area, &" ".repeat(area.width.into()), style);
    let chosen = style.add_modifier(Modifier::BOLD | Modifier::UNDERLINED);
    let of = |is_chosen| if is_chosen { chosen } else { style };
    put(buffer, area, "NAME", of(state.sort == Sort::Name));
    for (column, cell) in cells(area, columns) {
        let is_chosen = matches!(state.sort, Sort::Column(at) if COLUMNS[at].title == column.title);
        put_right(buffer, cell, column.title, of(is_chosen));
    }
}

fn draw_line(buffer: &mut Buffer, area: Rect, line: &Line, columns: &[&Column], is_selected: bool) {
    let row = &line.row;
    let style = style_of(row, is_selected);
    put(buffer, area, &" ".repeat(area.width.into()), style);
    let mark = match line.fold {
        Fold::Leaf => ' ',
        Fold::Open => '-',
        Fold::Closed => '+',
    };
    let indent = " ".repeat(2 * line.depth);
    let name = Rect {
        width: name_width(area, columns),
        ..area
    };
    put(buffer, name, &format!("{indent}{mark}{}", row.name), style);
    let Some(numbers) = &row.numbers else {
        let rest = Rect {
            x: name.x + name.width + 1,
            width: area.width.saturating_sub(name.width + 1),
            ..area
        };
        return put(buffer, rest, &row.remark, style);
    };
    for (column, cell) in cells(area, columns) {
        let style = style.patch(warning(column, numbers));
        put_right(buffer, cell, &(column.text)(numbers), style);
    }
}

fn style_of(row: &Row, is_selected: bool) -> Style {
    let is_idle = |numbers: &Numbers| numbers.iops == 0.0 && numbers.queued == 0;
    let modifier = match &row.key {
        _ if is_selected => Modifier::REVERSED,
        Key::Queue(_) => Modifier::BOLD,
        _ if row.numbers.as_ref().is_none_or(is_idle) => Modifier::DIM,
        _ => Modifier::empty(),
    };
    Style::new().add_modifier(modifier)
}

/// The style of values to be noticed: errors, and groups at their cap.
fn warning(column: &Column, numbers: &Numbers) -> Style {
    match column.title {
        "ERR/s" if numbers.errors > 0.0 => Style::new().fg(Color::Red),
        "CAP" if numbers.capped.is_some_and(|used| used >= AT_CAP) => Style::new().fg(Color::Yellow),
        _ => Style::new(),
    }
}

fn draw_foot(buffer: &mut Buffer, area: Rect, state: &State) {
    let keys: &[(&str, &str)] = match state.mode {
        Mode::Lines => FOOT,
        Mode::Search => &[("F3", "Next"), ("Enter", "Done"), ("Esc", "Done")],
        Mode::Filter => &[("Enter", "Keep"), ("Esc", "Clear")],
        Mode::Help => &[("any key", "Back")],
    };
    let mut at = area;
    for (key, what) in keys {
        for (text, style) in [
            (*key, Style::new()),
            (*what, Style::new().add_modifier(Modifier::REVERSED)),
            (" ", Style::new()),
        ] {
            put(buffer, at, text, style);
            let width = (text.len() as u16).min(at.width);
            at.x += width;
            at.width -= width;
        }
    }
}

/// Each column with its place on a line.
fn cells<'a>(area: Rect, columns: &'a [&'a Column]) -> impl Iterator<Item = (&'a Column, Rect)> {
    let mut x = area.x + name_width(area, columns);
    columns.iter().map(move |column| {
        let width = column.width;
        let cell = Rect {
            x: x + 1,
            width,
            ..area
        };
        x += width + 1;
        (*column, cell)
    })
}

fn name_width(area: Rect, columns: &[&Column]) -> u16 {
    let used: u16 = columns.iter().map(|column| column.width + 1).sum();
    area.width.saturating_sub(used)
}

fn row_of(area: Rect, number: usize) -> Rect {
    let y = (area.y + number as u16).min(area.bottom());
    let height = u16::from(y < area.bottom());
    Rect { y, height, ..area }
}

/// Writes as much of a text as fits.
fn put(buffer: &mut Buffer, area: Rect, text: &str, style: Style) {
    if area.height > 0 && area.width > 0 {
        buffer.set_stringn(area.x, area.y, text, area.width.into(), style);
    }
}

fn put_right(buffer: &mut Buffer, area: Rect, text: &str, style: Style) {
    let width = usize::from(area.width);
    put(buffer, area, &format!("{text:>width$}"), style);
}

/// The full name of a line.
fn path_of(row: &Row) -> &str {
    match &row.key {
        Key::Group(_, path) => path,
        Key::Queue(name) | Key::Disk(name) => name,
    }
}

fn several(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

fn duration(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let time = format!("{:02}:{:02}:{:02}", rest / 3600, rest / 60 % 60, rest % 60);
    if days == 0 {
        time
    } else {
        format!("{days}d {time}")
    }
}

const FOOT: &[(&str, &str)] = &[
    ("F1", "Help"),
    ("F3", "Search"),
    ("F4", "Filter"),
    ("F5", "Tree/List"),
    ("F6", "Sort"),
    ("Space", "Fold"),
    ("z", "Freeze"),
    ("F10", "Quit"),
];
/// Lines above the titles.
const HEAD_LINES: usize = 4;

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::state::tests::example;
    use super::*;

    fn screen(state: &mut State, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, state)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let cells = |y| (0..width).map(move |x| (x, y));
        let line = |y| cells(y).map(|at| buffer[at].symbol()).collect::<String>();
        (0..height).map(|y| line(y).trim_end().to_owned()).collect()
    }

    fn words(line: &str) -> Vec<&str> {
        line.split_whitespace().collect()
    }

    #[test]
    fn small_terminal_shows_what_matters_most() {
        let screen = screen(&mut example(), 80, 24);
        assert!(screen[0].contains("1 queue  4 groups  3 disks"), "{}", screen[0]);
        assert!(screen[1].contains("IOPS 400  read 1.6M/s"), "{}", screen[1]);
        let titles = [
            "NAME", "IOPS", "B/s", "WAIT99", "DEV50", "DEV99", "QUEUE", "DUE", "GOT", "CAP",
        ];
        assert_eq!(words(&screen[4]), titles);
        let a = [
            "+a", "300", "1.2M", "1.0us", "100us", "100us", "0", "75%", "75%", "75%",
        ];
        assert_eq!(words(&screen[7]), a);
        assert_eq!(words(&screen[5])[..3], ["-q", "(bfq)", "400"]);
        assert!(screen[5].contains("7/64"));
        assert!(screen[23].contains("F10Quit"));
    }

    #[test]
    fn wide_one_says_who_waits_behind_whom() {
        let screen = screen(&mut example(), 140, 40);
        assert!(
            screen[4].contains("BEHIND") && screen[4].contains("WEIGHT"),
            "{}",
            screen[4]
        );
        assert!(screen[6].contains("/x 75%"), "{}", screen[6]);
    }

    #[test]
    fn no_terminal_is_too_small_and_the_selected_line_is_always_on_it() {
        for (width, height) in [(1, 1), (3, 9), (20, 5), (40, 7), (500, 3)] {
            screen(&mut example(), width, height);
        }
        let mut state = example();
        state.go(isize::MAX);
        let small = screen(&mut state, 80, 8);
        assert!(small[6].contains("idle"), "{small:?}");
        state.go(-2);
        let small = screen(&mut state, 80, 8);
        assert!(small[5].starts_with("    +a"), "{small:?}");
    }

    #[test]
    fn disks_are_said_to_be_disks_and_help_explains_what_is_shown() {
        let mut state = example();
        state.go(2);
        state.fold(None);
        let shown = screen(&mut state, 80, 24);
        assert_eq!(words(&shown[8]), ["vm1", "disk,", "8.0G,", "1", "client"]);
        state.mode = Mode::Help;
        let help = screen(&mut state, 80, 24).join("\n");
        assert!(help.contains("DEV99") && !help.contains("BEHIND"), "{help}");
        assert!(help.contains("all in it/depth"), "{help}");
    }

    #[test]
    fn fault_is_reported() {
        let mut state = example();
        state.lost = Some("the daemon has closed the connection".to_owned());
        assert!(screen(&mut state, 80, 24)[3].starts_with("trying again: the daemon has closed"));
        state.lost = None;
        state.is_frozen = true;
        assert!(screen(&mut state, 80, 24)[3].starts_with("frozen"));
        state.mode = Mode::Filter;
        state.filter = "abc".to_owned();
        assert!(screen(&mut state, 80, 24)[3].starts_with("Filter: abc_"));
    }

    #[test]
    fn times_are_days_and_hours() {
        assert_eq!([59, 90_061].map(duration), ["00:00:59", "1d 01:01:01"]);
    }
}
