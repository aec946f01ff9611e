//! Writes the Rust blocks of the documentation as modules for `docs.rs`.
//!
//! A block with `fn main` is a program, and any other block is part of the `main` of the program
//! before it. An HTML comment on the line before a block changes that:
//! `<!-- continues PAGE -->` names the page with the program, `<!-- part of FILE -->` a file that
//! contains the block.
#[allow(dead_code)]
#[path = "../../crates/float8-cli/tests/program/docs/markdown.rs"]
mod markdown;

use std::path::Path;
use std::{env, fs};

use markdown::{chapters, root};

/// Pages, relative to the root of the repository. Folders are searched.
const PAGES: [&str; 3] = ["README.md", "crates/burn-float8/README.md", "docs"];

/// Program of a page, and the modules of the blocks that continue it.
struct Program {
    page: String,
    line: usize,
    text: String,
    parts: String,
}

fn main() {
    PAGES.iter().for_each(rerun_if_changed);
    let (mut programs, mut parts) = (vec![], vec![]);
    for chapter in chapters(&PAGES) {
        for block in chapter.blocks_in("rust") {
            let page = chapter.name.clone();
            if block.text.contains("fn main()") {
                programs.push(Program { page, line: block.line, text: block.text, parts: String::new() });
            } else {
                parts.push((page, block));
            }
        }
    }
    for (page, block) in parts {
        let (place, mark) = (format!("{page}:{}", block.line), block.mark.unwrap_or_default());
        if let Some(file) = mark.strip_prefix("part of ") {
            rerun_if_changed(&file);
            let whole =
                fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{place}: {file}: {error}"));
            assert!(whole.contains(&block.text), "{place}: {file} does not contain this block");
            continue;
        }
        let program = match mark.strip_prefix("continues ") {
            Some(other) => programs.iter_mut().find(|program| program.page == other),
            None => programs.iter_mut().rfind(|program| program.page == page && program.line < block.line),
        };
        program.unwrap_or_else(|| panic!("{place}: no program before this block")).parts += &format!(
            "mod {} {{\nuse super::*;\nfn part() -> Result<(), burn_float8::Float8Error> {{\n{}\nOk(())\n}}\n\
             #[test]\nfn runs() {{ part().unwrap() }}\n}}\n",
            module(&page, block.line),
            block.text
        );
    }
    let modules = programs.into_iter().map(|Program { page, line, text, parts }| {
        let name = module(&page, line);
        format!("mod {name} {{\n{text}\n#[test]\nfn runs() {{ main().unwrap() }}\n{parts}}}\n")
    });
    let out = env::var("OUT_DIR").unwrap();
    fs::write(Path::new(&out).join("docs.rs"), modules.collect::<String>()).unwrap();
}

fn rerun_if_changed(name: &&str) {
    println!("cargo::rerun-if-changed={}", root().join(name).display());
}

/// Name of a block's module: its page and its first line.
fn module(page: &str, line: usize) -> String {
    let page = page.trim_end_matches(".md").to_lowercase();
    format!("{}_{line}", page.replace(|c: char| !c.is_ascii_alphanumeric(), "_"))
}
