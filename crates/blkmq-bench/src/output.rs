//! The output of a bench: its table to stdout, and JSON and a picture to the requested files.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::args::BenchArgs;
use crate::report::{Report, Row, say};
use crate::{programs, svg, table};

impl Report {
    /// Takes the rows, prints the table and writes the files that `args` names.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn finish(&mut self, rows: Vec<Row>, args: &BenchArgs) -> Result<()> {
        let table = table::draw(&rows);
        self.finish_with(&table, rows, args)
    }

    /// The same with the bench's own table.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn finish_with(&mut self, table: &str, rows: Vec<Row>, args: &BenchArgs) -> Result<()> {
        self.host.after_run();
        self.programs = programs::known();
        self.rows = rows;
        let load = format!(
            "load average before {:.2}, after {:.2}\n",
            self.host.load_before, self.host.load_after
        );
        say(&(table.to_owned() + &load));
        if let Some(file) = &args.json {
            let text = serde_json::to_string_pretty(self).context("turning the report into JSON")?;
            write(file, &(text + "\n"))?;
        }
        if let Some(file) = &args.svg {
            write(file, &svg::draw(self))?;
        }
        Ok(())
    }
}

fn write(file: &Path, text: &str) -> Result<()> {
    fs::write(file, text).with_context(|| format!("writing {}", file.display()))?;
    eprintln!("wrote {}", file.display());
    Ok(())
}
