//! The `sh` blocks of the documentation: kinds of lines.

use super::markdown::Chapter;

/// Cargo commands that need no mark. CI runs the first two, and the program of the third runs here.
const CARGO: [&str; 3] = [
    "cargo test --release --workspace",
    "cargo run --release --example llama3_fp8",
    "cargo run --release --bin float8 -- --help",
];

/// Whether a line is run here.
///
/// # Errors
/// A kind of line that the documentation must not contain.
fn is_run(line: &str) -> Result<bool, String> {
    let (command, comment) = line.split_once(" #").map_or((line, ""), |(command, comment)| (command, comment.trim()));
    let is_marked = comment == "needs a GPU"
        || comment.strip_prefix("not run in CI:").is_some_and(|reason| !reason.trim().is_empty());
    match command.trim() {
        _ if is_marked => Ok(false),
        command if command.starts_with("float8 ") => Ok(true),
        command if CARGO.contains(&command) => Ok(false),
        _ => Err("end it in `# needs a GPU` or `# not run in CI: reason`, if it is no command of `float8`".into()),
    }
}

/// Commands of a chapter to run, with their line numbers, and errors of other lines.
pub(super) fn commands(chapter: &Chapter) -> (Vec<(usize, String)>, Vec<String>) {
    let (mut run, mut wrong) = (vec![], vec![]);
    for (first, block) in chapter.blocks("sh") {
        let mut begun: Option<(usize, String)> = None;
        for (number, line) in (first..).zip(block.lines()) {
            let (number, line) = match begun.take() {
                Some((number, begin)) => (number, begin + line),
                None => (number, line.to_string()),
            };
            if let Some(begin) = line.strip_suffix('\\') {
                begun = Some((number, begin.to_string()));
                continue;
            }
            if line.trim().is_empty() || line.starts_with("# ") {
                continue;
            }
            match is_run(&line) {
                Ok(true) => run.push((number, line)),
                Ok(false) => {}
                Err(reason) => wrong.push(format!("{}:{number}: {line}\n    {reason}", chapter.name)),
            }
        }
        wrong.extend(begun.map(|(number, line)| format!("{}:{number}: {line}\\\n    goes on nowhere", chapter.name)));
    }
    (run, wrong)
}
