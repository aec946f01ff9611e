//! Checks that every method of every operation trait of burn-backend is forwarded by name.
//!
//! A defaulted method that is not forwarded compiles, but silently replaces the inner backend's
//! fast kernel with the generic one. The test compares the list in `src/ops/delegate.rs` with the
//! sources of the traits.
use std::collections::{BTreeMap, BTreeSet};
use std::panic;
use std::path::{Path, PathBuf};
use std::sync::{OnceLock, mpsc};

use burn_backend::ops::unfold::calculate_unfold_windows;
use syn::{FnArg, ImplItem, Item, TraitItem, TypeParamBound};

/// Sources of burn-backend that this test was compiled with. A panic in them names its file, which
/// the compiling machine has. `cargo metadata` is no alternative, since it downloads dependencies
/// of other platforms.
fn burn_backend_src() -> &'static Path {
    static SRC: OnceLock<PathBuf> = OnceLock::new();
    SRC.get_or_init(|| {
        let (sender, receiver) = mpsc::channel();
        panic::set_hook(Box::new(move |info| {
            let file = info.location().map(|location| location.file().to_string());
            sender.send(file).expect("the receiver outlives the hook");
        }));
        let outcome = panic::catch_unwind(|| calculate_unfold_windows(1, 1, 0));
        drop(panic::take_hook());
        assert!(outcome.is_err(), "an unfold by steps of 0 no longer panics");
        let file = receiver.recv().ok().flatten().expect("the panic has a location");
        // The path is relative if the sources are in the workspace: vendored, or in a CARGO_HOME
        // there.
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file);
        let src = file.ancestors().find(|dir| dir.ends_with("src")).filter(|src| src.join("lib.rs").is_file());
        src.unwrap_or_else(|| panic!("no sources of burn-backend around {}", file.display())).to_path_buf()
    })
}

/// Rust files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let nested = entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] });
    nested.filter(|path| path.extension().is_some_and(|extension| extension == "rs")).collect()
}

/// `Backend` and its supertraits, with all their methods.
fn upstream() -> BTreeMap<String, BTreeSet<String>> {
    let mut traits = BTreeMap::new();
    for file in files(burn_backend_src()) {
        let parsed = syn::parse_file(&std::fs::read_to_string(&file).unwrap()).unwrap();
        for item in parsed.items {
            if let Item::Trait(t) = item {
                traits.insert(t.ident.to_string(), t);
            }
        }
    }
    let supertraits = traits["Backend"].supertraits.iter().filter_map(|bound| match bound {
        TypeParamBound::Trait(t) => Some(t.path.segments.last().unwrap().ident.to_string()),
        _ => None,
    });
    let names = supertraits.chain(["Backend".to_string()]).filter(|name| traits.contains_key(name));
    let methods = |name: &str| {
        let items = traits[name].items.iter();
        items.filter_map(|i| if let TraitItem::Fn(f) = i { Some(f.sig.ident.to_string()) } else { None }).collect()
    };
    names.map(|name| (name.clone(), methods(&name))).collect()
}

/// Methods of each `impl .. for Float8<B>` in `src/ops/delegate.rs`, written out or in the macro's
/// list.
fn forwarded() -> BTreeMap<String, BTreeSet<String>> {
    let source = include_str!("../src/ops/delegate.rs");
    let mut found = BTreeMap::<String, BTreeSet<String>>::new();
    for item in syn::parse_file(source).unwrap().items {
        let Item::Impl(block) = item else { continue };
        let Some((path, _)) = &block.trait_ else { continue };
        let methods = found.entry(path.segments.last().unwrap().ident.to_string()).or_default();
        for item in block.items {
            match item {
                ImplItem::Fn(f) => {
                    methods.insert(f.sig.ident.to_string());
                }
                ImplItem::Macro(m) => {
                    let tokens: Vec<_> = m.mac.tokens.into_iter().map(|t| t.to_string()).collect();
                    methods.extend(tokens.windows(2).filter(|w| w[0] == "fn").map(|w| w[1].clone()));
                }
                _ => {}
            }
        }
    }
    found
}

#[test]
fn every_operation_is_forwarded() {
    let (upstream, forwarded) = (upstream(), forwarded());
    let count: usize = upstream.values().map(BTreeSet::len).sum();
    assert!(count > 400, "found only {count} operations: has burn-backend moved its traits?");
    for (name, methods) in &upstream {
        let ours = forwarded.get(name).cloned().unwrap_or_default();
        let missing: Vec<_> = methods.difference(&ours).collect();
        assert!(missing.is_empty(), "{name}: not forwarded: {missing:?}");
    }
}

/// The methods of `Float8Backend` must not shadow Burn's.
#[test]
fn no_name_collides_with_burn() {
    let upstream = upstream();
    let ours = syn::parse_file(include_str!("../src/backend/mod.rs")).unwrap();
    let own = ours.items.into_iter().find_map(|i| match i {
        Item::Trait(t) if t.ident == "Float8Backend" => Some(t),
        _ => None,
    });
    for item in own.expect("the trait is there").items {
        if let TraitItem::Fn(f) = item {
            let name = f.sig.ident.to_string();
            assert!(!f.sig.inputs.iter().any(|a| matches!(a, FnArg::Receiver(_))), "{name} takes self");
            assert!(upstream.values().all(|methods| !methods.contains(&name)), "{name} is Burn's");
        }
    }
}
