//! Doc comments as Markdown for readers of configurations: links to Rust items become their text, lines are wrapped.

/// Columns of a line.
const WIDTH: usize = 130;

/// A part of a doc comment.
pub enum Block {
    Paragraph(String),
    /// A fenced block, fences included.
    Fenced(Vec<String>),
}

/// The parts of a doc comment, up to its first example in Rust: what comes from there on is about programs.
pub fn blocks(doc: &[String]) -> Vec<Block> {
    let mut blocks = vec![];
    let mut paragraph: Vec<&str> = vec![];
    let mut lines = doc.iter();
    while let Some(line) = lines.next() {
        if let Some(language) = line.strip_prefix("```") {
            flush(&mut paragraph, &mut blocks);
            if !matches!(language, "toml" | "text") {
                return blocks;
            }
            let code = lines.by_ref().take_while(|line| !line.starts_with("```")).cloned();
            blocks.push(Block::Fenced([line.clone()].into_iter().chain(code).chain(["```".into()]).collect()));
        } else if line.is_empty() {
            flush(&mut paragraph, &mut blocks);
        } else {
            paragraph.push(line);
        }
    }
    flush(&mut paragraph, &mut blocks);
    blocks
}

fn flush(lines: &mut Vec<&str>, blocks: &mut Vec<Block>) {
    if !lines.is_empty() {
        blocks.push(Block::Paragraph(without_rust_links(&lines.join(" "))));
        lines.clear();
    }
}

/// A doc comment of paragraphs alone, in one.
pub fn sentences(doc: &[String]) -> String {
    let paragraphs = blocks(doc).into_iter().map(|block| match block {
        Block::Paragraph(text) => text,
        Block::Fenced(lines) => panic!("the doc of a key has a block: {lines:?}"),
    });
    paragraphs.collect::<Vec<_>>().join(" ")
}

/// The text with `[a](b)` as `a` unless `b` is an address, and `[a]` as `a` where that is code.
fn without_rust_links(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some(start) = rest.find(['`', '[']) {
        plain.push_str(&rest[..start]);
        rest = &rest[start..];
        let end = match rest.starts_with('`') {
            true => rest[1..].find('`').map_or(rest.len(), |end| end + 2),
            false => closing(rest, '[', ']').unwrap_or(1),
        };
        let (part, after) = rest.split_at(end);
        rest = after;
        let inner = part.strip_prefix('[').and_then(|part| part.strip_suffix(']'));
        match inner {
            Some(inner) if after.starts_with('(') => {
                let end = closing(after, '(', ')').unwrap_or_else(|| panic!("a link without an end: {text}"));
                let is_address = after.starts_with("(http");
                plain.push_str(&if is_address { format!("{part}{}", &after[..end]) } else { inner.to_string() });
                rest = &after[end..];
            }
            Some(inner) if inner.starts_with('`') && inner.ends_with('`') => plain.push_str(inner),
            _ => plain.push_str(part),
        }
    }
    plain + rest
}

/// The length of what begins with `open` up to the bracket that closes it, code left out.
fn closing(text: &str, open: char, close: char) -> Option<usize> {
    let (mut depth, mut code) = (0, false);
    for (i, letter) in text.char_indices() {
        match letter {
            '`' => code = !code,
            _ if code => {}
            _ if letter == open => depth += 1,
            _ if letter == close && depth == 1 => return Some(i + letter.len_utf8()),
            _ if letter == close => depth -= 1,
            _ => {}
        }
    }
    None
}

/// Wrapped text. The first line begins with `first`, the others with as many spaces as `indent`. Code is not broken, nor is a line
/// that Markdown would take for the item of a list.
pub fn wrap(first: &str, indent: usize, text: &str) -> String {
    let mut is_code = false;
    let is_gap = |letter: char| {
        is_code ^= letter == '`';
        letter == ' ' && !is_code
    };
    let mut words: Vec<String> = vec![];
    for word in text.split(is_gap).filter(|word| !word.is_empty()) {
        let is_marker = matches!(word, "-" | "+" | "*" | "=" | "·") || word.starts_with(['#', '>', '|']);
        match words.last_mut() {
            Some(last) if is_marker => *last = format!("{last} {word}"),
            _ => words.push(word.into()),
        }
    }
    let mut wrapped = String::new();
    let mut line = first.to_string();
    let mut is_empty = true;
    for word in words {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            wrapped += &format!("{line}\n");
            line = " ".repeat(indent);
            is_empty = true;
        }
        line += &format!("{}{word}", if is_empty { "" } else { " " });
        is_empty = false;
    }
    wrapped + &line + "\n"
}

mod tests {
    use super::*;

    #[test]
    fn links_to_items_become_their_text() {
        for (text, expected) in [
            ("see [`Schedule`], [`at`](Schedule::at) and [it](crate::it())", "see `Schedule`, `at` and it"),
            ("in [0, 1), `[float8]` or `[K, N]`", "in [0, 1), `[float8]` or `[K, N]`"),
            ("[the paper](https://arxiv.org/abs/1)", "[the paper](https://arxiv.org/abs/1)"),
            ("[`a[0]`](x) and [0, 1] of `b", "`a[0]` and [0, 1] of `b"),
        ] {
            assert_eq!(without_rust_links(text), expected);
        }
    }

    #[test]
    fn wrapped_lines_are_neither_too_long_nor_items() {
        let text = "a word and `   some code with spaces` - so many ".repeat(20);
        let wrapped = wrap("- ", 2, &text);
        assert!(wrapped.lines().count() > 5);
        for (i, line) in wrapped.lines().enumerate() {
            assert!(line.chars().count() <= WIDTH, "{line}");
            assert!(line.starts_with(if i == 0 { "- a" } else { "  " }) && !line.starts_with("  -"), "{line}");
            assert_eq!(line.matches('`').count() % 2, 0, "{line}");
        }
        assert_eq!(wrapped.matches("`   some code with spaces` -").count(), 20);
        assert_eq!(wrapped.split_whitespace().skip(1).collect::<Vec<_>>(), text.split_whitespace().collect::<Vec<_>>());
    }

    #[test]
    fn an_example_in_rust_ends_a_doc() {
        let doc = ["One", "two.", "", "```toml", "[a]", "```", "", "Three.", "```", "fn main() {}", "```", "Four."];
        let blocks = blocks(&doc.map(String::from));
        let texts: Vec<_> = blocks
            .iter()
            .map(|block| match block {
                Block::Paragraph(text) => text.clone(),
                Block::Fenced(lines) => lines.join("|"),
            })
            .collect();
        assert_eq!(texts, ["One two.", "```toml|[a]|```", "Three."]);
    }
}
