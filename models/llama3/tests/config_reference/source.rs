//! The structs and enums of the configuration, read from their sources: keys, types, doc comments, and what serde is told of them.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use syn::{Expr, Fields, GenericArgument, Item, ItemEnum, ItemStruct, Lit, PathArguments, Type, UseTree};

use crate::attributes::{Serde, derives_default, doc_lines, is_default_variant, renamed};

/// Fields that a reader written by hand takes from the same table, as `#[serde(flatten)]` would: type and field.
const FLATTENED: [(&str, &str); 1] = [("train::Float8Section", "config")];

/// What a key's value is.
#[derive(Clone, Debug)]
pub enum Shape {
    Boolean,
    Integer,
    Number,
    String,
    Path,
    /// Any number of them, or exactly so many.
    List(Box<Shape>, Option<usize>),
    Table(Box<Table>),
    /// One of these strings.
    Choice(Choice),
    /// One of these, told apart by their types.
    Either(String, Vec<(Shape, Vec<String>)>),
}

/// An enum whose variants are strings in a file.
#[derive(Clone, Debug)]
pub struct Choice {
    /// With its crate, as `train::Precision`.
    pub type_name: String,
    /// Names in a file, and docs.
    pub variants: Vec<(String, Vec<String>)>,
    pub default: Option<String>,
}

/// A struct that is a table in a file.
#[derive(Clone, Debug)]
pub struct Table {
    /// With its crate.
    pub type_name: String,
    pub doc: Vec<String>,
    /// The fields of each struct that this one is made of: more than one where `flatten` puts several together.
    pub groups: Vec<Group>,
    /// serde fills in what is missing from the type's `Default`.
    pub has_default: bool,
    /// Whether the default is derived: that of each field.
    pub derives_default: bool,
}

#[derive(Clone, Debug)]
pub struct Group {
    pub type_name: String,
    pub doc: Vec<String>,
    pub fields: Vec<Field>,
}

#[derive(Clone, Debug)]
pub struct Field {
    pub key: String,
    pub aliases: Vec<String>,
    pub doc: Vec<String>,
    pub shape: Shape,
    /// An `Option`.
    pub optional: bool,
    /// `#[serde(default)]`, or absent in a file because it is its type's default.
    pub may_be_default: bool,
}

/// The sources of the workspace's crates.
pub struct Sources {
    files: BTreeMap<String, Vec<SourceFile>>,
}

struct SourceFile {
    text: String,
    /// Parsed when they are first asked for: most files need not be.
    items: OnceCell<Vec<Item>>,
}

impl SourceFile {
    fn items(&self) -> &[Item] {
        self.items.get_or_init(|| syn::parse_file(&self.text).unwrap().items)
    }

    fn definition(&self, name: &str) -> Option<&Item> {
        self.items().iter().find(|item| match item {
            Item::Struct(item) => item.ident == name,
            Item::Enum(item) => item.ident == name,
            _ => false,
        })
    }

    /// The path that a name is imported by.
    fn import(&self, name: &str) -> Option<Vec<String>> {
        let uses =
            self.items().iter().filter_map(|item| if let Item::Use(item) = item { Some(&item.tree) } else { None });
        uses.flat_map(|tree| imports(tree, &[])).find(|(alias, _)| alias == name).map(|(_, path)| path)
    }
}

/// A file of a crate.
#[derive(Clone, Copy)]
struct Place<'a> {
    library: &'a str,
    file: &'a SourceFile,
}

impl Sources {
    /// The sources of the crates that the workspace's manifest has paths of.
    pub fn of_workspace(root: &Path) -> Self {
        let manifest: toml::Table = toml::from_str(&fs::read_to_string(root.join("Cargo.toml")).unwrap()).unwrap();
        let dependencies = manifest["workspace"]["dependencies"].as_table().unwrap();
        let paths =
            dependencies.iter().filter_map(|(name, it)| Some((name.replace('-', "_"), it.get("path")?.as_str()?)));
        let read = |path: &str| {
            let mut files = vec![];
            rust_files(&root.join(path).join("src"), &mut files);
            files
        };
        Self { files: paths.map(|(name, path)| (name, read(path))).collect() }
    }

    /// The struct of this name.
    pub fn table(&self, library: &str, type_name: &str) -> Table {
        match self.search(library, type_name) {
            (place, Item::Struct(item)) => self.read_struct(place, item),
            _ => panic!("{library}::{type_name} is no struct"),
        }
    }

    /// The text of the file that defines a type.
    pub fn text_with<'a>(&'a self, library: &'a str, type_name: &str) -> &'a str {
        &self.search(library, type_name).0.file.text
    }

    fn read_struct(&self, place: Place, item: &ItemStruct) -> Table {
        let type_name = format!("{}::{}", place.library, item.ident);
        let serde = Serde::of(&item.attrs);
        let Fields::Named(fields) = &item.fields else { panic!("{type_name}: fields without names") };
        // What a file has where that is another struct, which need not repeat the docs.
        let file = serde.try_from.as_deref().filter(|name| *name != "Table").map(|name| self.resolve(place, name));
        let (read_at, read) = match &file {
            Some((place, Item::Struct(ItemStruct { fields: Fields::Named(fields), .. }))) => (*place, fields),
            Some(_) => panic!("{type_name} is read from something that has no named fields"),
            None => (place, fields),
        };
        let (mut groups, mut own) = (vec![], vec![]);
        for field in &read.named {
            let name = field.ident.as_ref().unwrap().to_string();
            let told = Serde::of(&field.attrs);
            if told.skip {
                continue;
            }
            let (shape, optional) = self.shape(read_at, &field.ty);
            if told.flatten || FLATTENED.contains(&(&*type_name, &*name)) {
                match shape {
                    Shape::Table(table) => groups.extend(table.groups),
                    shape => panic!("{type_name}.{name}: {shape:?} is no table to flatten"),
                }
                continue;
            }
            let documented = fields.named.iter().find(|other| other.ident == field.ident).unwrap_or(field);
            own.push(Field {
                key: told.rename.clone().unwrap_or_else(|| renamed(serde.rename_all.as_deref(), &name)),
                aliases: told.aliases,
                doc: doc_lines(&documented.attrs),
                shape,
                optional,
                may_be_default: told.default || told.skips_default,
            });
        }
        // A reader that is written by hand takes its own keys out first.
        for field in groups.iter_mut().flat_map(|group: &mut Group| &mut group.fields) {
            if let Some(i) = own.iter().position(|own| own.key == field.key) {
                *field = own.remove(i);
            }
        }
        let doc = doc_lines(&item.attrs);
        groups.push(Group { type_name: type_name.clone(), doc: doc.clone(), fields: own });
        let (has_default, derives_default) = (serde.default, derives_default(&item.attrs));
        Table { type_name, doc, groups, has_default, derives_default }
    }

    fn read_enum(&self, place: Place, item: &ItemEnum) -> Shape {
        let type_name = format!("{}::{}", place.library, item.ident);
        let serde = Serde::of(&item.attrs);
        if serde.untagged {
            let inner = item.variants.iter().map(|variant| match &variant.fields {
                Fields::Unnamed(fields) if fields.unnamed.len() == 1 => {
                    (self.shape(place, &fields.unnamed[0].ty).0, doc_lines(&variant.attrs))
                }
                _ => panic!("{type_name}::{}: expected one value", variant.ident),
            });
            return Shape::Either(type_name.clone(), inner.collect());
        }
        let name = |variant: &syn::Variant| {
            assert!(matches!(variant.fields, Fields::Unit), "{type_name}::{} is no string", variant.ident);
            let told = Serde::of(&variant.attrs);
            told.rename.unwrap_or_else(|| renamed(serde.rename_all.as_deref(), &variant.ident.to_string()))
        };
        let variants = item.variants.iter().map(|variant| (name(variant), doc_lines(&variant.attrs))).collect();
        let default = item.variants.iter().find(|variant| is_default_variant(&variant.attrs)).map(name);
        Shape::Choice(Choice { type_name, variants, default })
    }

    /// The shape of a type, and whether it is an `Option` of that.
    fn shape(&self, place: Place, ty: &Type) -> (Shape, bool) {
        match ty {
            Type::Array(array) => {
                let Expr::Lit(length) = &array.len else { panic!("an array of a length that is no literal") };
                let Lit::Int(length) = &length.lit else { panic!("an array of a length that is no integer") };
                let inner = Box::new(self.shape(place, &array.elem).0);
                (Shape::List(inner, Some(length.base10_parse().unwrap())), false)
            }
            Type::Path(path) => {
                let segment = path.path.segments.last().unwrap();
                let inner = || match &segment.arguments {
                    PathArguments::AngleBracketed(arguments) => match arguments.args.first() {
                        Some(GenericArgument::Type(ty)) => self.shape(place, ty).0,
                        _ => panic!("{}: what of?", segment.ident),
                    },
                    _ => panic!("{}: what of?", segment.ident),
                };
                let shape = match &*segment.ident.to_string() {
                    "Option" => return (inner(), true),
                    "Vec" => Shape::List(Box::new(inner()), None),
                    "bool" => Shape::Boolean,
                    // Or a text, which its doc tells.
                    "StepCount" => Shape::Integer,
                    "u8" | "u16" | "u32" | "u64" | "usize" | "i8" | "i16" | "i32" | "i64" | "isize" => Shape::Integer,
                    "f32" | "f64" => Shape::Number,
                    "String" => Shape::String,
                    "PathBuf" => Shape::Path,
                    name => match self.resolve(place, name) {
                        (place, Item::Struct(item)) => Shape::Table(Box::new(self.read_struct(place, item))),
                        (place, Item::Enum(item)) => self.read_enum(place, item),
                        _ => panic!("{name} is neither struct nor enum"),
                    },
                };
                (shape, false)
            }
            _ => panic!("a field of a type that is no path"),
        }
    }

    /// What a name stands for in a file: a type of the file, an import, or a type of the crate.
    fn resolve<'a>(&'a self, place: Place<'a>, name: &str) -> (Place<'a>, &'a Item) {
        if let Some(item) = place.file.definition(name) {
            return (place, item);
        }
        match place.file.import(name) {
            Some(path) => self.search(self.library_of(&path, place.library), path.last().unwrap()),
            None => self.search(place.library, name),
        }
    }

    fn library_of<'a>(&'a self, path: &[String], own: &'a str) -> &'a str {
        self.files.get_key_value(&path[0]).map_or(own, |(library, _)| library)
    }

    /// The definition of a name in a crate, or in the crate that it has it from.
    fn search<'a>(&'a self, library: &'a str, name: &str) -> (Place<'a>, &'a Item) {
        let files = || self.files[library].iter().filter(|file| file.text.contains(name));
        let starts = [format!("struct {name}"), format!("enum {name}")];
        let found = files().filter(|file| starts.iter().any(|start| file.text.contains(start)));
        let found = found.filter_map(|file| Some((Place { library, file }, file.definition(name)?)));
        match found.collect::<Vec<_>>()[..] {
            [found] => found,
            [] => {
                let path = files().filter_map(|file| file.import(name)).find(|path| self.files.contains_key(&path[0]));
                let path = path.unwrap_or_else(|| panic!("no {name} in the sources of {library}"));
                self.search(self.library_of(&path, library), path.last().unwrap())
            }
            _ => panic!("{library} has several types {name}: import the one that is meant"),
        }
    }
}

fn rust_files(dir: &Path, files: &mut Vec<SourceFile>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(SourceFile { text: fs::read_to_string(&path).unwrap(), items: OnceCell::new() });
        }
    }
}

/// Names that a `use` brings, and their paths.
fn imports(tree: &UseTree, path: &[String]) -> Vec<(String, Vec<String>)> {
    let with = |name: &syn::Ident| [path, &[name.to_string()]].concat();
    match tree {
        UseTree::Path(tree) => imports(&tree.tree, &with(&tree.ident)),
        UseTree::Name(tree) => vec![(tree.ident.to_string(), with(&tree.ident))],
        UseTree::Rename(tree) => vec![(tree.rename.to_string(), with(&tree.ident))],
        UseTree::Group(tree) => tree.items.iter().flat_map(|tree| imports(tree, path)).collect(),
        UseTree::Glob(_) => vec![],
    }
}
