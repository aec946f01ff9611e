//! The `sh` and `python` blocks of the documentation: commands to run, and marked blocks.

use super::markdown::Chapter;

/// Start of the mark of a block that no test runs. A reason follows.
const NOT_RUN: [&str; 3] = ["not run: ", "not run here: ", "tested with "];

/// Commands of a chapter to run, with their line numbers, and errors: blocks that are neither run
/// nor marked.
pub(super) fn commands(chapter: &Chapter) -> (Vec<(usize, String)>, Vec<String>) {
    let (mut run, mut wrong) = (vec![], vec![]);
    for block in chapter.blocks().into_iter().filter(|block| ["sh", "python"].contains(&&*block.language)) {
        let mark = block.mark.as_deref().unwrap_or_default();
        if NOT_RUN.iter().any(|start| mark.starts_with(start)) {
            continue;
        }
        let mut begun: Option<(usize, String)> = None;
        for (number, line) in (block.line..).zip(block.text.lines()) {
            let (number, line) = match begun.take() {
                Some((number, begin)) => (number, begin + line),
                None => (number, line.to_string()),
            };
            if let Some(begin) = line.strip_suffix('\\') {
                begun = Some((number, begin.to_string()));
            } else if line.starts_with("float8 ") && block.language == "sh" {
                run.push((number, line));
            } else {
                let name = &chapter.name;
                wrong.push(format!("{name}:{number}: {line}\n    put `<!-- not run: reason -->` before the block"));
            }
        }
        wrong.extend(begun.map(|(number, line)| format!("{}:{number}: {line}\\\n    incomplete", chapter.name)));
    }
    (run, wrong)
}
