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

/// Files below a folder, with the first component of their relative path.
fn files(root: &Path) -> Vec<(String, PathBuf)> {
    let mut found = vec![];
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let first = path.strip_prefix(root).unwrap().iter().next().unwrap().to_string_lossy();
                found.push((first.trim_end_matches(".rs").to_string(), path));
            }
        }
    }
    found
}

/// Modules after each `crate::` in code.
fn imports(source: &str) -> Vec<String> {
    let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    let after = |line: &str| -> Vec<String> {
        let names = line.split("crate::").skip(1);
        // `$crate::` belongs to the users of a macro.
        let own = names.zip(line.split("crate::")).filter(|(_, before)| !before.ends_with('$'));
        own.map(|(name, _)| name.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()).collect()
    };
    code.flat_map(after).collect()
}

/// Modules of `lib.rs` that a file reaches by `super::` repeated `depth` times.
fn reached_by_super(source: &str, depth: usize, order: &[String]) -> Vec<String> {
    let up = "super::".repeat(depth);
    let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    let after = |line: &str| -> Vec<String> {
        let name = |rest: &str| rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
        line.split(&up).skip(1).map(name).filter(|name| order.contains(name)).collect()
    };
    code.flat_map(after).collect()
}

#[test]
fn modules_import_downwards_only() {
    let order = order();
    assert!(order.len() > 8, "{order:?}");
    let place = |name: &str| order.iter().position(|module| module == name);
    let (mut checked, mut upwards) = (0, vec![]);
    for (module, path) in files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src")) {
        let Some(own) = place(&module) else {
            assert_eq!(module, "lib", "{} is in no module of lib.rs", path.display());
            continue;
        };
        let source = std::fs::read_to_string(&path).unwrap();
        // `layer.rs` and `layer/mod.rs` have depth 1, `layer/tag.rs` has depth 2.
        let parts = path.strip_prefix(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap().iter().count();
        let depth = parts - usize::from(parts > 1 && path.ends_with("mod.rs"));
        for import in [imports(&source), reached_by_super(&source, depth, &order)].concat() {
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
