//! What the attributes of a type, field or variant say: its doc comment, its defaults, and serde's names.

use syn::{Attribute, Expr, Lit, LitStr, Meta, Token};

/// serde's attributes that change keys and defaults.
#[derive(Debug, Default)]
pub struct Serde {
    pub skip: bool,
    pub flatten: bool,
    pub untagged: bool,
    pub default: bool,
    /// A value that is its type's default is left out.
    pub skips_default: bool,
    pub rename: Option<String>,
    pub rename_all: Option<String>,
    pub aliases: Vec<String>,
    pub try_from: Option<String>,
}

impl Serde {
    /// Panics at an attribute that it does not know, since that might be about names.
    pub fn of(attributes: &[Attribute]) -> Self {
        let mut told = Self::default();
        for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("serde")) {
            let parsed = attribute.parse_nested_meta(|meta| {
                let name = meta.path.require_ident()?.to_string();
                let value = match meta.input.peek(Token![=]) {
                    true => Some(meta.value()?.parse::<LitStr>()?.value()),
                    false => None,
                };
                match (&*name, value) {
                    ("skip", None) => told.skip = true,
                    ("flatten", None) => told.flatten = true,
                    ("untagged", None) => told.untagged = true,
                    ("default", None) => told.default = true,
                    ("rename", Some(name)) => told.rename = Some(name),
                    ("rename_all", Some(case)) => told.rename_all = Some(case),
                    ("alias", Some(name)) => told.aliases.push(name),
                    ("try_from", Some(name)) => told.try_from = Some(name),
                    ("skip_serializing_if", Some(name)) => match &*name {
                        "is_default" | "Vec::is_empty" => told.skips_default = true,
                        "Option::is_none" => {}
                        _ => panic!("skip_serializing_if = {name:?}: is that the default of the type?"),
                    },
                    ("deny_unknown_fields", None) | ("remote" | "expecting", Some(_)) => {}
                    (name, value) => panic!("#[serde({name} {value:?})]: what does it mean for the keys of a file?"),
                }
                Ok(())
            });
            parsed.unwrap();
        }
        told
    }
}

/// The lines of a doc comment, without the space after `///`.
pub fn doc_lines(attributes: &[Attribute]) -> Vec<String> {
    let docs = attributes.iter().filter_map(|attribute| match &attribute.meta {
        Meta::NameValue(it) if it.path.is_ident("doc") => match &it.value {
            Expr::Lit(it) => match &it.lit {
                Lit::Str(text) => Some(text.value()),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    });
    docs.map(|line| line.strip_prefix(' ').unwrap_or(&line).to_string()).collect()
}

/// Whether `Default` is among the derived traits.
pub fn derives_default(attributes: &[Attribute]) -> bool {
    let mut derives = false;
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("derive")) {
        let parsed = attribute.parse_nested_meta(|meta| {
            derives |= meta.path.is_ident("Default");
            Ok(())
        });
        parsed.unwrap();
    }
    derives
}

/// Whether `#[default]` marks the variant.
pub fn is_default_variant(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| attribute.path().is_ident("default"))
}

/// A name as `rename_all` has it.
pub fn renamed(case: Option<&str>, name: &str) -> String {
    match case {
        None => name.into(),
        Some("lowercase") => name.to_lowercase(),
        Some("snake_case") => {
            let mut snake = String::new();
            for (i, letter) in name.chars().enumerate() {
                if letter.is_uppercase() && i > 0 {
                    snake.push('_');
                }
                snake.extend(letter.to_lowercase());
            }
            snake
        }
        Some(case) => panic!("rename_all = {case:?}: how are names then?"),
    }
}
