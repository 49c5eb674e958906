//! Checks that a reader finds every document: each page is reached from the index, and no link is broken.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

#[test]
fn every_page_is_reached_from_the_index() {
    let reached = reached_from("docs/README.md");
    let mut all = BTreeSet::new();
    pages_below(Path::new("docs"), &mut all);
    assert!(all.len() > 30, "only {} pages were found", all.len());
    let lost: Vec<_> = all.difference(&reached).collect();
    assert!(lost.is_empty(), "no way leads from docs/README.md to {lost:?}");
}

#[test]
fn index_names_every_page_itself_but_for_the_decisions() {
    let index: BTreeSet<PathBuf> = links(Path::new("docs/README.md")).into_iter().collect();
    let decisions: BTreeSet<PathBuf> = links(Path::new("docs/design/README.md")).into_iter().collect();
    let mut all = BTreeSet::new();
    pages_below(Path::new("docs"), &mut all);
    all.remove(Path::new("docs/README.md"));
    for page in all {
        let is_decision = page.starts_with("docs/design") && !page.ends_with("README.md");
        let list = if is_decision { &decisions } else { &index };
        assert!(list.contains(&page), "{} is not in its index", page.display());
    }
}

#[test]
fn decision_has_a_problem_a_price_and_measurements() {
    let mut all = BTreeSet::new();
    pages_below(Path::new("docs/design"), &mut all);
    all.retain(|page| !page.ends_with("README.md"));
    assert!(all.len() >= 13, "only {} decisions were found", all.len());
    for page in all {
        let text = fs::read_to_string(root().join(&page)).expect("the page was listed");
        let parts: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("## ")).collect();
        let expected = ["Problem", "Decision", "Price", "Measurements"];
        assert_eq!(parts, expected, "{}", page.display());
    }
}

#[test]
fn no_link_between_documents_leads_nowhere() {
    let mut all = BTreeSet::from([PathBuf::from("README.md"), PathBuf::from("CONTRIBUTING.md")]);
    pages_below(Path::new("docs"), &mut all);
    let broken: Vec<String> = all
        .iter()
        .flat_map(|page| links(page).into_iter().map(move |link| (page, link)))
        .filter(|(_, link)| !root().join(link).exists())
        .map(|(page, link)| format!("{}: {}", page.display(), link.display()))
        .collect();
    assert!(
        broken.is_empty(),
        "links that lead nowhere:\n{}",
        broken.join("\n")
    );
}

#[test]
fn readme_has_at_most_120_lines() {
    let text = fs::read_to_string(root().join("README.md")).expect("README is there");
    let lines = text.lines().count();
    assert!(
        lines <= 120,
        "README has {lines} lines: the rest belongs to a page"
    );
}

/// Every page that is reached by links from `start`.
fn reached_from(start: &str) -> BTreeSet<PathBuf> {
    let mut reached = BTreeSet::new();
    let mut waiting = vec![PathBuf::from(start)];
    while let Some(page) = waiting.pop() {
        let is_page = page.extension().is_some_and(|extension| extension == "md");
        if is_page && root().join(&page).exists() && reached.insert(page.clone()) {
            waiting.extend(links(&page));
        }
    }
    reached
}

/// The files to which a page links, relative to the root.
fn links(page: &Path) -> Vec<PathBuf> {
    let text =
        fs::read_to_string(root().join(page)).unwrap_or_else(|error| panic!("{}: {error}", page.display()));
    let dir = page.parent().unwrap_or(Path::new(""));
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets
        .map(|target| target.split('#').next().unwrap_or_default())
        .filter(|target| !target.is_empty() && !target.contains(':') && !target.contains(' '))
        .map(|target| plain(&dir.join(target)))
        .collect()
}

/// The path without `.` and `..`.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                plain.pop();
            }
            Component::CurDir => {}
            part => plain.push(part),
        }
    }
    plain
}

fn pages_below(dir: &Path, pages: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(root().join(dir)).expect("the directory can be read") {
        let path = dir.join(entry.expect("an entry").file_name());
        if root().join(&path).is_dir() {
            pages_below(&path, pages);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            pages.insert(path);
        }
    }
}

fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().expect("xtask lies in the root").to_owned()
}
