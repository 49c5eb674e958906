//! Decides how a chore's options are read: few, long, and every one that is not known is an error.

use anyhow::{Context, Result, ensure};

/// The words after `cargo xtask` that no one has taken yet.
pub(crate) struct Args {
    words: Vec<String>,
}

impl Args {
    pub(crate) fn from_command_line() -> Args {
        Args {
            words: std::env::args().skip(1).collect(),
        }
    }

    /// Takes the first word that is not an option.
    pub(crate) fn positional(&mut self) -> Option<String> {
        let index = self
            .words
            .iter()
            .position(|word| !word.starts_with("--") || word == "--help")?;
        Some(self.words.remove(index))
    }

    /// Takes `name`; false where it was not given.
    pub(crate) fn flag(&mut self, name: &str) -> bool {
        let index = self.words.iter().position(|word| word == name);
        index.map(|index| self.words.remove(index)).is_some()
    }

    /// Takes `name N`. To be called before [`Args::positional`], which would take `N`.
    pub(crate) fn number(&mut self, name: &str) -> Result<Option<u64>> {
        let Some(index) = self.words.iter().position(|word| word == name) else {
            return Ok(None);
        };
        ensure!(index + 1 < self.words.len(), "{name} wants a number after it");
        self.words.remove(index);
        let word = self.words.remove(index);
        let number = word
            .parse()
            .with_context(|| format!("{name} wants a whole number, not `{word}`"))?;
        Ok(Some(number))
    }

    /// Takes all that is left.
    pub(crate) fn rest(self) -> Vec<String> {
        self.words
    }

    /// # Errors
    /// If a word is left that the chore does not know.
    pub(crate) fn finish(self) -> Result<()> {
        ensure!(
            self.words.is_empty(),
            "not understood: {}; see `cargo xtask help`",
            self.words.join(" ")
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Args;

    fn args(line: &str) -> Args {
        Args {
            words: line.split_whitespace().map(str::to_owned).collect(),
        }
    }

    #[test]
    fn options_may_stand_before_or_after_the_name() {
        for line in ["fuzz --seconds 5 nbd", "fuzz nbd --seconds 5"] {
            let mut args = args(line);
            assert_eq!(args.positional().as_deref(), Some("fuzz"));
            assert_eq!(args.number("--seconds").unwrap(), Some(5));
            assert_eq!(args.positional().as_deref(), Some("nbd"));
            args.finish().unwrap();
        }
    }

    #[test]
    fn what_is_not_known_is_refused() {
        assert!(
            args("--deeep")
                .finish()
                .unwrap_err()
                .to_string()
                .contains("--deeep")
        );
        assert!(args("--seconds").number("--seconds").is_err());
        assert!(args("--seconds ten").number("--seconds").is_err());
    }
}
