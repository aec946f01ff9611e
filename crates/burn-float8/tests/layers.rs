//! Checks that the crate's modules import only downwards, in the order of `lib.rs`.
use std::path::{Path, PathBuf};

/// Modules of `lib.rs`, lowest first.
fn order() -> Vec<String> {
    let file = syn::parse_file(include_str!("../src/lib.rs")).unwrap();
    let module = |item| match item {
        syn::Item::Mod(module) if module.content.is_none() => Some(module.ident.to_string()),
        _ => None,
    };
    file.items.into_iter().filter_map(module).collect()
}

/// Rust files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let nested = entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] });
    nested.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}

/// Names after each `path` in code.
fn names_after(source: &str, path: &str) -> Vec<String> {
    let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    let after = |line: &str| -> Vec<String> {
        let parts = line.split(path);
        // `$crate::` belongs to the users of a macro.
        let own = parts.clone().skip(1).zip(parts).filter(|(_, before)| !before.ends_with('$'));
        own.map(|(name, _)| name.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()).collect()
    };
    code.flat_map(after).collect()
}

#[test]
fn modules_import_downwards_only() {
    let order = order();
    assert!(order.len() > 8, "{order:?}");
    let place = |name: &str| order.iter().position(|module| module == name);
    let (mut checked, mut upwards) = (0, vec![]);
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for path in files(&src) {
        let source = std::fs::read_to_string(&path).unwrap();
        let parts: Vec<_> = path.strip_prefix(&src).unwrap().iter().map(|part| part.to_string_lossy()).collect();
        let module = parts[0].trim_end_matches(".rs");
        let Some(own) = place(module) else {
            assert_eq!(module, "lib", "{} is in no module of lib.rs", path.display());
            continue;
        };
        // `layer.rs` and `layer/mod.rs` have depth 1, `layer/tag.rs` has depth 2.
        let depth = parts.len() - usize::from(parts.len() > 1 && path.ends_with("mod.rs"));
        let by_super = names_after(&source, &"super::".repeat(depth)).into_iter().filter(|name| order.contains(name));
        for import in names_after(&source, "crate::").into_iter().chain(by_super) {
            let Some(imported) = place(&import) else {
                panic!("{}: crate::{import} is no module of lib.rs: import from where it is defined", path.display());
            };
            checked += 1;
            if imported > own {
                upwards.push(format!("{}: crate::{import}", path.display()));
            }
        }
    }
    assert!(checked > 100, "only {checked} imports found");
    assert!(upwards.is_empty(), "imports that point up:\n{}", upwards.join("\n"));
}

/// The root has the common names of user programs; the rest is in public modules.
#[test]
fn the_root_has_few_names() {
    fn count(tree: &syn::UseTree) -> usize {
        match tree {
            syn::UseTree::Path(path) => count(&path.tree),
            syn::UseTree::Group(group) => group.items.iter().map(count).sum(),
            syn::UseTree::Name(_) | syn::UseTree::Rename(_) => 1,
            syn::UseTree::Glob(_) => panic!("a glob hides how many names there are"),
        }
    }
    let file = syn::parse_file(include_str!("../src/lib.rs")).unwrap();
    let names = file.items.iter().map(|item| match item {
        syn::Item::Use(names) if matches!(names.vis, syn::Visibility::Public(_)) => count(&names.tree),
        _ => 0,
    });
    let names: usize = names.sum();
    assert!((15..=25).contains(&names), "{names} names");
}
