//! Parsed production sources, with module paths and items; tests are left out.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use syn::{Attribute, Item};

/// A production file.
pub(super) struct Source {
    /// The crate's folder, such as `engine`.
    pub(super) package: String,
    /// From the repository's root.
    pub(super) path: PathBuf,
    /// Module path in its crate; empty for the root.
    pub(super) module: Vec<String>,
    pub(super) items: Vec<Item>,
}

impl Source {
    pub(super) fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new(""))
    }

    /// The path with a line.
    pub(super) fn at(&self, line: usize) -> String {
        format!("{}:{line}", self.path.display())
    }
}

/// Reads all crates, `xtask` and `tests`.
pub(super) fn read(root: &Path) -> Result<Vec<Source>> {
    let mut folders = vec![root.join("xtask"), root.join("tests")];
    for entry in fs::read_dir(root.join("crates"))? {
        folders.push(entry?.path());
    }
    folders.sort();
    let mut sources = Vec::new();
    for folder in folders {
        let package = folder.file_name().unwrap_or_default().to_string_lossy();
        let src = folder.join("src");
        let mut files = Vec::new();
        list(&src, &mut files)?;
        files.sort();
        for file in files {
            sources.push(read_file(root, &package, &src, file)?);
        }
    }
    Ok(sources)
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        if name == "tests" || name.ends_with("_tests") {
            continue;
        }
        if path.is_dir() {
            list(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}

fn read_file(root: &Path, package: &str, src: &Path, file: PathBuf) -> Result<Source> {
    let text = fs::read_to_string(&file)?;
    let items = parse(&text).with_context(|| file.display().to_string())?;
    let place = file.strip_prefix(src)?.with_extension("");
    let mut module: Vec<String> = place
        .iter()
        .map(|part| part.to_string_lossy().into_owned())
        .collect();
    let is_root = |name: &str| matches!(name, "mod" | "lib" | "main");
    if module.last().is_some_and(|name| is_root(name)) {
        module.pop();
    }
    Ok(Source {
        package: package.to_owned(),
        path: file.strip_prefix(root)?.to_owned(),
        module,
        items,
    })
}

/// A file's items without tests.
pub(super) fn parse(text: &str) -> Result<Vec<Item>> {
    let mut items = syn::parse_file(text)?.items;
    drop_tests(&mut items);
    Ok(items)
}

fn drop_tests(items: &mut Vec<Item>) {
    items.retain(|item| !is_test(attributes(item)));
    for item in items {
        match item {
            Item::Mod(module) => {
                if let Some((_, items)) = &mut module.content {
                    drop_tests(items);
                }
            }
            Item::Impl(block) => block.items.retain(|item| match item {
                syn::ImplItem::Fn(function) => !is_test(&function.attrs),
                _ => true,
            }),
            _ => {}
        }
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Whether it is `test` or a `cfg` with `test`.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else {
            return attribute.path().is_ident("test");
        };
        let text = list.tokens.to_string();
        let mut words = text.split(|c: char| !c.is_alphanumeric() && c != '_' && c != '"');
        attribute.path().is_ident("cfg")
            && !text.contains("not")
            && words.any(|word| word == "test")
    })
}

/// Finds `foo.rs` beside `foo/`, and `#[path]` modules.
pub(super) fn style(sources: &[Source]) -> Vec<String> {
    let beside = sources.iter().filter(|source| {
        let folder = source.path.with_extension("");
        sources.iter().any(|other| other.folder() == folder)
    });
    let found: Vec<String> = beside
        .map(|source| format!("{}: its folder has no mod.rs", source.path.display()))
        .collect();
    super::print("module files beside their folders", found.len(), "0");
    found
}
