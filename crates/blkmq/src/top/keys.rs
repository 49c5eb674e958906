//! What each key does, as in htop if htop has it.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::state::{Fold, Mode, Shape, State};

/// Executes a key. `shown` are the numbers of the columns on the screen.
pub(super) fn press(state: &mut State, key: KeyEvent, shown: &[usize]) {
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        state.is_over |= key.code == KeyCode::Char('c');
        return;
    }
    match state.mode {
        Mode::Lines => in_lines(state, key.code, shown),
        Mode::Search => in_search(state, key.code),
        Mode::Filter => in_filter(state, key.code),
        // Any key except those that end the program leads back.
        Mode::Help => match key.code {
            KeyCode::F(10) => state.is_over = true,
            _ => state.mode = Mode::Lines,
        },
    }
}

fn in_lines(state: &mut State, code: KeyCode, shown: &[usize]) {
    let page = state.page.max(1) as isize;
    match code {
        KeyCode::Char('q') | KeyCode::F(10) => state.is_over = true,
        KeyCode::Char('h' | '?') | KeyCode::F(1) => state.mode = Mode::Help,
        KeyCode::Up | KeyCode::Char('k') => state.go(-1),
        KeyCode::Down | KeyCode::Char('j') => state.go(1),
        KeyCode::PageUp => state.go(-page),
        KeyCode::PageDown => state.go(page),
        KeyCode::Home | KeyCode::Char('g') => state.go(isize::MIN),
        KeyCode::End | KeyCode::Char('G') => state.go(isize::MAX),
        KeyCode::Char('/') | KeyCode::F(3) => {
            state.sought.clear();
            state.mode = Mode::Search;
        }
        KeyCode::Char('n') => state.find(1),
        KeyCode::Char('\\') | KeyCode::F(4) => state.mode = Mode::Filter,
        KeyCode::Esc => {
            state.filter.clear();
            state.arrange();
        }
        KeyCode::Char('t') | KeyCode::F(5) | KeyCode::Tab => {
            state.shape = match state.shape {
                Shape::Tree => Shape::List,
                Shape::List => Shape::Tree,
            };
            state.arrange();
        }
        KeyCode::Char('>') | KeyCode::F(6) => state.sort_on(shown, 1),
        KeyCode::Char('<') => state.sort_on(shown, -1),
        KeyCode::Char('I') => {
            state.is_reversed = !state.is_reversed;
            state.arrange();
        }
        KeyCode::Char('i') => {
            state.hides_idle = !state.hides_idle;
            state.arrange();
        }
        KeyCode::Char(' ') | KeyCode::Enter => state.fold(None),
        KeyCode::Char('+') | KeyCode::Right => state.fold(Some(Fold::Open)),
        KeyCode::Char('-') | KeyCode::Left => state.fold(Some(Fold::Closed)),
        KeyCode::Char('z' | 'Z' | 'p') => state.is_frozen = !state.is_frozen,
        _ => {}
    }
}

fn in_search(state: &mut State, code: KeyCode) {
    match code {
        KeyCode::Esc | KeyCode::Enter => state.mode = Mode::Lines,
        KeyCode::F(3) | KeyCode::Down => state.find(1),
        code => {
            type_into(&mut state.sought, code);
            state.find(0);
        }
    }
}

fn in_filter(state: &mut State, code: KeyCode) {
    match code {
        KeyCode::Enter => state.mode = Mode::Lines,
        KeyCode::Esc => {
            state.filter.clear();
            state.mode = Mode::Lines;
        }
        code => type_into(&mut state.filter, code),
    }
    state.arrange();
}

fn type_into(text: &mut String, code: KeyCode) {
    match code {
        KeyCode::Char(letter) if text.chars().count() < TEXT_MAX => text.push(letter),
        KeyCode::Backspace => drop(text.pop()),
        _ => {}
    }
}

/// Longer than any path that is typed.
const TEXT_MAX: usize = 100;

#[cfg(test)]
mod tests {
    use super::super::state::Sort;
    use super::super::state::tests::{example, names};
    use super::*;

    fn types(state: &mut State, text: &str) {
        for letter in text.chars() {
            let code = match letter {
                '\n' => KeyCode::Enter,
                '\t' => KeyCode::Tab,
                '\u{1b}' => KeyCode::Esc,
                '\u{8}' => KeyCode::Backspace,
                letter => KeyCode::Char(letter),
            };
            press(state, code.into(), SHOWN);
        }
    }

    fn selected(state: &State) -> &str {
        names(state)[state.selected_line().unwrap()]
    }

    const SHOWN: &[usize] = &[0, 1, 7];

    #[test]
    fn arrows_and_pages_move_and_stop_at_the_ends() {
        let mut state = example();
        state.page = 2;
        for (code, name) in [
            (KeyCode::Down, "c"),
            (KeyCode::PageDown, "b"),
            (KeyCode::PageDown, "idle"),
            (KeyCode::Down, "idle"),
            (KeyCode::Up, "b"),
            (KeyCode::PageUp, "c"),
            (KeyCode::End, "idle"),
            (KeyCode::Home, "q (bfq)"),
            (KeyCode::Up, "q (bfq)"),
        ] {
            press(&mut state, code.into(), SHOWN);
            assert_eq!(selected(&state), name, "after {code:?}");
        }
    }

    #[test]
    fn lines_open_and_close() {
        let mut state = example();
        types(&mut state, "j-");
        assert_eq!(names(&state), ["q (bfq)", "c", "idle"]);
        types(&mut state, "-");
        assert_eq!(names(&state), ["q (bfq)", "c", "idle"]);
        types(&mut state, "+ ");
        assert_eq!(names(&state), ["q (bfq)", "c", "idle"]);
        types(&mut state, "j+");
        assert_eq!(names(&state), ["q (bfq)", "c", "idle", "vm3"]);
    }

    #[test]
    fn search_goes_to_what_has_the_text_and_on_from_there() {
        let mut state = example();
        types(&mut state, "/c/");
        assert_eq!((selected(&state), state.mode), ("a", Mode::Search));
        press(&mut state, KeyCode::F(3).into(), SHOWN);
        assert_eq!(selected(&state), "b");
        types(&mut state, "\nn");
        assert_eq!((selected(&state), state.mode), ("a", Mode::Lines));
        types(&mut state, "/nowhere\u{1b}");
        assert_eq!(selected(&state), "a");
    }

    #[test]
    fn filter_stays_until_it_is_taken_back() {
        let mut state = example();
        types(&mut state, "\\idlex\u{8}\n");
        assert_eq!(
            (names(&state), state.mode),
            (vec!["q (bfq)", "idle"], Mode::Lines)
        );
        types(&mut state, "\\\u{1b}");
        assert_eq!((names(&state).len(), state.filter.as_str()), (5, ""));
    }

    #[test]
    fn column_to_sort_by_is_one_on_the_screen() {
        let mut state = example();
        let mut seen = Vec::new();
        for _ in 0..4 {
            types(&mut state, ">");
            seen.push(state.sort);
        }
        let column = Sort::Column;
        assert_eq!(seen, [column(1), column(7), Sort::Name, column(0)]);
        types(&mut state, "<I");
        assert_eq!((state.sort, names(&state)[1]), (Sort::Name, "idle"));
    }

    #[test]
    fn keys_that_end_it_end_it() {
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        for key in [KeyCode::Char('q').into(), KeyCode::F(10).into(), control_c] {
            let mut state = example();
            press(&mut state, key, SHOWN);
            assert!(state.is_over, "{key:?}");
        }
        // Typed characters are text; Ctrl-C ends the program there, too.
        let mut state = example();
        types(&mut state, "/q");
        assert!(!state.is_over);
        press(&mut state, control_c, SHOWN);
        assert!(state.is_over);
    }

    #[test]
    fn views_help_and_the_frozen_screen_come_and_go() {
        let mut state = example();
        types(&mut state, "\tiz?");
        assert_eq!(
            (names(&state), state.is_frozen),
            (vec!["/c", "/c/a", "/c/b"], true)
        );
        assert_eq!(state.mode, Mode::Help);
        types(&mut state, "x\tip");
        assert_eq!(
            (names(&state).len(), state.mode, state.is_frozen),
            (5, Mode::Lines, false)
        );
    }
}
