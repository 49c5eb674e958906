//! What is logged, as `BLKMQ_LOG` and `blkmq ctl log` have it: a level, others for parts of the
//! program, or both: `info,blkmq_export=debug`.

use anyhow::{Context, Result, bail};
use tracing_subscriber::EnvFilter;

/// The filter in `BLKMQ_LOG`; without it everything from `info` on.
///
/// # Errors
/// The filter is invalid.
pub fn of_environment() -> Result<EnvFilter> {
    match super::setting("BLKMQ_LOG")?.as_str() {
        "" => parse("info"),
        filter => parse(filter).context("environment: BLKMQ_LOG"),
    }
}

/// Reads a filter. Parts of the program that it does not name log their errors.
///
/// # Errors
/// A word is neither a level nor a part with one.
pub fn parse(filter: &str) -> Result<EnvFilter> {
    let parsed =
        check_levels(filter).and_then(|()| Ok(EnvFilter::builder().parse(format!("error,{filter}"))?));
    parsed.with_context(|| format!("filter {:?} rejected", start_of(filter)))
}

/// Refuses a word that is no level: it would count as the name of a module, and silence all others.
fn check_levels(filter: &str) -> Result<()> {
    let words = filter.split(',').map(str::trim).filter(|word| !word.is_empty());
    for word in words.filter(|word| !word.contains(['=', '['])) {
        let is_level = LEVELS.iter().any(|level| level.eq_ignore_ascii_case(word));
        if !is_level && !word.starts_with("blkmq") {
            bail!(
                "{:?} is no level: {}; for a part of the program, PART=LEVEL",
                start_of(word),
                LEVELS.join(", ")
            );
        }
    }
    Ok(())
}

/// The part of a text that an error repeats.
fn start_of(text: &str) -> &str {
    let end = (0..=text.len().min(TOLD_MAX))
        .rev()
        .find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
const TOLD_MAX: usize = 100;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filter_with_a_word_that_is_no_level_is_refused_with_the_levels() {
        for filter in ["debug", "INFO", "info,blkmq_host=trace", "blkmq_core", ""] {
            assert!(parse(filter).is_ok(), "{filter}");
        }
        for filter in ["debgu", "info,x", "5"] {
            let error = format!("{:#}", parse(filter).unwrap_err());
            assert!(error.contains("off, error, warn, info, debug, trace"), "{error}");
        }
        assert!(parse("blkmq_host=debgu").is_err());
        assert_eq!(start_of(&"é".repeat(100)).len(), 100);
        assert_eq!(start_of(&format!("x{}", "é".repeat(100))).len(), 99);
    }

    #[test]
    fn filter_of_one_part_leaves_the_errors_of_the_others() {
        for (filter, has_errors) in [("blkmq_host=debug", true), ("info", true), ("off", false)] {
            let levels = parse(filter).unwrap().to_string();
            let mut levels = levels.split(',');
            assert_eq!(
                levels.any(|level| ["error", "info"].contains(&level)),
                has_errors,
                "{filter}"
            );
        }
    }
}
